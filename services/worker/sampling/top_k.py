"""``top_k``: drops tokens less probable than the k-th; those equal to it survive."""

from __future__ import annotations

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows
from services.worker.sampling.row_ops import kth_largest


class TopK:
    """See ``LogitsTransform``."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int) -> None:
        """
        Args:
            max_num_seqs: Rows.
            vocab_size: A ``top_k`` of at least this is off.
        """
        self._vocab_size = vocab_size
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)  # 0 = off

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        is_used = 0 < params.top_k < self._vocab_size and not params.is_greedy
        self._top_k[row] = params.top_k if is_used else 0
        return is_used

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._top_k[row] = 0

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        values = self._top_k[rows.rows]
        for line in np.flatnonzero(values).tolist():
            row = logits[line]
            row.masked_fill_(row < kth_largest(row, int(values[line])), -torch.inf)
