"""One vector per prompt: the mean of its tokens' states, summed up chunk by chunk.

The mean is taken over the states after the final norm and scaled to length 1, in float32 whatever
the model's dtype (mean pooling as in sentence-transformers).
"""

from __future__ import annotations

import numpy as np
import torch

from services.common.errors import RequestFailed, SluicewayError
from services.worker.runner.input_batch import InputBatch
from services.worker.runner.request_state import RequestStates
from services.worker.runner.step_input import Floats


class Pooler:
    """What has been summed up of the rows that pool.

    A row must see all tokens of its prompt: it starts with nothing computed (its request reads no
    prefix cache), and one that was preempted starts over as a new row.
    """

    def __init__(self) -> None:
        self._handles: dict[int, int] = {}  # by row
        self._sums: dict[int, torch.Tensor] = {}  # by row: [hidden_size] float32

    def add(self, row: int, handle: int) -> None:
        """A vector is wanted of a new row."""
        self._handles[row] = handle

    def remove(self, row: int) -> None:
        """Forget a row; harmless for one that does not pool."""
        self._handles.pop(row, None)
        self._sums.pop(row, None)

    def take(
        self, states: RequestStates, batch: InputBatch, hidden: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Take in the states of a step.

        Args:
            states: The rows.
            batch: The step's inputs.
            hidden: ``[num_tokens, hidden_size]``, after the final norm.

        Returns:
            By handle, ``[hidden_size]`` float32 on the device: of rows whose prompt is complete.
        """
        if not self._handles:
            return {}
        complete = {}
        for i, row in enumerate(batch.rows.tolist()):
            if row not in self._handles:
                continue
            begin, end = batch.query_start_loc[i], batch.query_start_loc[i + 1]
            total = hidden[begin:end].sum(dim=0, dtype=torch.float32)
            if row in self._sums:
                total += self._sums[row]
            self._sums[row] = total
            num_tokens = batch.first_positions[i] + batch.num_tokens[i]
            if num_tokens == states.num_prompt[row]:
                mean = total / int(num_tokens)
                complete[self._handles[row]] = torch.nn.functional.normalize(mean, dim=0)
        return complete


def read_vectors(
    pooled: dict[int, torch.Tensor],
) -> tuple[dict[int, Floats], dict[int, SluicewayError]]:
    """Copy vectors to the host.

    Returns:
        Those that are numbers, and errors for those that are not; both by handle.
    """
    vectors = {handle: vector.cpu().numpy() for handle, vector in pooled.items()}
    errors: dict[int, SluicewayError] = {
        handle: RequestFailed("the model's states are not finite numbers")
        for handle, vector in vectors.items()
        if not np.isfinite(vector).all()
    }
    return {handle: vectors[handle] for handle in vectors.keys() - errors.keys()}, errors
