"""``logit_bias``: a number added to the logits of some tokens."""

from __future__ import annotations

import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows
from services.worker.sampling.row_ids import RowIds


class LogitBias:
    """See ``LogitsTransform``."""

    def __init__(self, device: torch.device) -> None:
        self._biases = RowIds(device)

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        return self._biases.set(row, list(params.logit_bias), list(params.logit_bias.values()))

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._biases.discard(row)

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        entries = self._biases.gather(rows.rows)
        if entries is not None:
            logits[entries.lines, entries.ids] += entries.values
