"""``temperature``: divides the logits; greedy rows are left as they are."""

from __future__ import annotations

import numpy as np
import torch

from services.common.sampling import MIN_TEMPERATURE, SamplingParams
from services.worker.sampling.base import LogitRows


class Temperature:
    """See ``LogitsTransform``."""

    def __init__(self, *, max_num_seqs: int, device: torch.device) -> None:
        """
        Args:
            max_num_seqs: Rows.
            device: Where the logits are.
        """
        self._values = np.ones(max_num_seqs, dtype=np.float32)
        self._device = device

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        value = 1.0 if params.is_greedy else max(params.temperature, MIN_TEMPERATURE)
        self._values[row] = value
        return value != 1

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._values[row] = 1

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        values = self._values[rows.rows]
        if (values != 1).any():
            logits.div_(torch.from_numpy(values).to(self._device).unsqueeze(1))
