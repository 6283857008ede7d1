"""The seam of a logits transform: what it is told of rows, and what it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from services.common.sampling import SamplingParams

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Whose logits a matrix holds.

    Attributes:
        rows: ``[n]``: the row of each line of the matrix.
        num_prompt: ``[n]``: prompt tokens of each.
        num_known: ``[n]``: tokens of each so far, which is the position of the token to be drawn.
        token_ids: ``[max_num_seqs, width]`` int32 on the device, indexed by ``rows``.
    """

    rows: Ints
    num_prompt: Ints
    num_known: Ints
    token_ids: torch.Tensor

    @property
    def num_outputs(self) -> Ints:
        """``[n]``: output tokens of each so far."""
        return self.num_known - self.num_prompt

    def take(self, index: Ints | slice) -> LogitRows:
        """Some of the lines."""
        return LogitRows(
            self.rows[index], self.num_prompt[index], self.num_known[index], self.token_ids
        )


class LogitsTransform(Protocol):
    """Changes the logits of those rows that asked for it."""

    def add(self, row: int, params: SamplingParams) -> bool:
        """Take a request's parameters for its row.

        Returns:
            Whether the row needs this transform.
        """
        ...

    def remove(self, row: int) -> None:
        """Forget a row; harmless for one that never needed this transform."""
        ...

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """Change logits in place.

        Args:
            logits: ``[n, vocab_size]`` float32.
            rows: Whose they are. Those that do not need the transform stay exactly as they are.
        """
        ...


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array of the host as a tensor of the device; on the CPU they share memory."""
    tensor = torch.from_numpy(values)
    # Even a ``to`` that does nothing lets another thread have the interpreter.
    return tensor if device.type == "cpu" else tensor.to(device)


def to_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array of the host; on the CPU they share memory."""
    return (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()
