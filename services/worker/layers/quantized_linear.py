"""The torch reference of a quantized linear layer: what every faster kernel must agree with.

It is also what runs where there is no faster one: on CUDA, and on a CPU without the native library.
The whole weight is widened on every call.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from services.worker.quantization.base import QuantizedWeight


class QuantizedLinear:
    """``F.linear`` over the weight in the dtype of the rows.

    Args:
        weight: Where the rows will be.
        bias: ``[out_size]``, or none.
        dtype: Of rows and results.
    """

    name = "dequantize"

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, *, dtype: torch.dtype
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, in_size]`` → ``[num_rows, out_size]``."""
        return functional.linear(x, self._weight.dequantize(self._dtype), self._bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: ``[num_ids]`` int64 → ``[num_ids, in_size]``."""
        return self._weight.rows(ids).dequantize(self._dtype)
