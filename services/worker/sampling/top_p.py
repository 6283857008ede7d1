"""``top_p``: keeps the smallest set of most probable tokens whose mass reaches p (nucleus sampling,
Holtzman et al. 2020). Probabilities are those after top-k.
"""

from __future__ import annotations

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows, to_device
from services.worker.sampling.row_ops import sort


class TopP:
    """See ``LogitsTransform``. Tokens equal to the last one kept are kept too; one always is."""

    def __init__(self, *, max_num_seqs: int, device: torch.device) -> None:
        """
        Args:
            max_num_seqs: Rows.
            device: Where the logits are.
        """
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._device = device

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        is_used = params.top_p < 1 and not params.is_greedy
        self._top_p[row] = params.top_p if is_used else 1
        return is_used

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._top_p[row] = 1

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        values = self._top_p[rows.rows]
        used = np.flatnonzero(values < 1)
        if not used.size:
            return
        lines = to_device(used, self._device)
        top_p = torch.from_numpy(values[used]).to(self._device).unsqueeze(1)
        chosen = logits[lines]
        floor = _smallest_kept(chosen, top_p)
        logits[lines] = chosen.masked_fill_(chosen < floor, -torch.inf)


def _smallest_kept(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """``[n, 1]``: logit of the least probable token of each line's nucleus."""
    ascending = sort(logits)
    mass_up_to = ascending.softmax(dim=-1).cumsum(dim=-1)
    num_dropped = (mass_up_to <= 1 - top_p).sum(dim=-1, keepdim=True)
    # The last one, the most probable, stays whatever rounding says.
    return ascending.gather(1, num_dropped.clamp(max=logits.shape[1] - 1))
