"""``allowed_token_ids``: every other token is banned."""

from __future__ import annotations

import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows
from services.worker.sampling.row_ids import RowIds


class AllowedTokenIds:
    """See ``LogitsTransform``."""

    def __init__(self, device: torch.device) -> None:
        self._ids = RowIds(device)

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        return self._ids.set(row, params.allowed_token_ids or ())

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._ids.discard(row)

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        entries = self._ids.gather(rows.rows)
        if entries is None:
            return
        kept = logits[entries.lines, entries.ids]
        logits[entries.used_lines] = -torch.inf
        logits[entries.lines, entries.ids] = kept
