"""The seam of weight quantization: what a method makes of a weight, and what is computed from it.

A method lives in a file of this folder named for what ``--quantization`` calls it. The file has the
functions of ``QuantizationMethod``. Weights are quantized as they are read from the checkpoint;
activations keep their dtype. What ``dequantize`` gives is the reference for every kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, Self

import torch
from torch.nn import functional

GROUP_SIZE = 32
"""Consecutive weights of a row that share a scale (so do ggml's Q8_0 and Q4_1); the native kernels
are written for it."""

_ROWS_AT_ONCE = 4096


class QuantizedWeight(Protocol):
    """A weight ``[out_size, in_size]`` in few bits.

    Attributes:
        shape: ``(out_size, in_size)``.
        native_create: Function of the native library that packs ``native_arrays``.
        native_arrays: Tensors in the order of that function's arguments.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def native_create(self) -> str: ...

    @property
    def native_arrays(self) -> tuple[torch.Tensor, ...]: ...

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """``[out_size, in_size]``, computed in float32 and rounded to ``dtype`` once."""
        ...

    def rows(self, ids: torch.Tensor) -> Self:
        """Some of the rows, ``ids``: ``[num_ids]`` int64."""
        ...

    def above(self, other: Self) -> Self:
        """The weight with the rows of another one, of the same method, below its own."""
        ...


Quantize = Callable[[torch.Tensor], QuantizedWeight]
"""Quantizes ``[out_size, in_size]`` of any float dtype, on the device where it is."""


class QuantizationMethod(Protocol):
    """A file of this folder."""

    @property
    def quantize(self) -> Quantize:
        """For linear layers."""
        ...

    @property
    def quantize_table(self) -> Quantize:
        """For the output head, which may be the embedding as well."""
        ...


class QuantizedSlot:
    """The place of a checkpoint tensor that is quantized as it is read: it is never held whole.

    Attributes:
        shape: Of the tensor.
    """

    def __init__(self, shape: tuple[int, int], quantize: Quantize, *, device: torch.device) -> None:
        """
        Args:
            shape: Of the tensor.
            quantize: What is done with it.
            device: Where its result shall be.
        """
        self.shape = torch.Size(shape)
        self._quantize = quantize
        self._device = device
        self._weight: QuantizedWeight | None = None

    def copy_(self, tensor: torch.Tensor) -> None:
        """Take the tensor's values, as ``torch.Tensor.copy_`` does."""
        self._weight = self._quantize(tensor.to(self._device))

    def take(self) -> QuantizedWeight:
        """What was made of the tensor; the slot is empty afterwards."""
        weight, self._weight = self._weight, None
        assert weight is not None, "slots are filled before they are taken from, once"
        return weight


def groups_of(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows in groups, some thousand rows at a time: ``[num_rows, num_groups, GROUP_SIZE]`` float32.

    A last group that is not whole is filled up with its last weight, which changes no extreme.
    """
    for rows in weight.split(_ROWS_AT_ONCE):
        missing = -rows.shape[1] % GROUP_SIZE
        whole = functional.pad(rows.float()[None], (0, missing), mode="replicate")[0]
        yield whole.unflatten(1, (-1, GROUP_SIZE))
