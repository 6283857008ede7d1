"""``min_p``: drops tokens less probable than a share of the most probable one."""

from __future__ import annotations

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows


class MinP:
    """See ``LogitsTransform``; compares logits, so no probabilities are computed."""

    def __init__(self, *, max_num_seqs: int, device: torch.device) -> None:
        """
        Args:
            max_num_seqs: Rows.
            device: Where the logits are.
        """
        # Logarithms: minus infinity = off.
        self._log_min_p = np.full(max_num_seqs, -np.inf, dtype=np.float32)
        self._device = device

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        is_used = params.min_p > 0 and not params.is_greedy
        self._log_min_p[row] = np.log(params.min_p) if is_used else -np.inf
        return is_used

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._log_min_p[row] = -np.inf

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        values = self._log_min_p[rows.rows]
        if not np.isfinite(values).any():
            return
        margin = torch.from_numpy(values).to(self._device).unsqueeze(1)
        logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + margin, -torch.inf)
