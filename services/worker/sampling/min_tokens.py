"""``min_tokens``: tokens that would end the output are banned until it has that many."""

from __future__ import annotations

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows, to_device
from services.worker.sampling.row_ids import RowIds


class MinTokens:
    """Bans the end-of-sequence ids (also with ``ignore_eos``) and ``stop_token_ids``."""

    def __init__(
        self, *, max_num_seqs: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        """
        Args:
            max_num_seqs: Rows.
            eos_token_ids: All end-of-sequence ids of the model.
            device: Where the logits are.
        """
        self._eos_token_ids = eos_token_ids
        self._stops = RowIds(device)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._device = device

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        self._min_tokens[row] = params.min_tokens
        if params.min_tokens == 0:
            return self._stops.set(row, ())
        return self._stops.set(row, sorted({*self._eos_token_ids, *params.stop_token_ids}))

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._min_tokens[row] = 0
        self._stops.discard(row)

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        is_short = rows.num_outputs < self._min_tokens[rows.rows]
        if not is_short.any():
            return
        short = np.flatnonzero(is_short)
        entries = self._stops.gather(rows.rows[short])
        if entries is not None:
            lines = to_device(short, self._device)[entries.lines]
            logits[lines, entries.ids] = -torch.inf
