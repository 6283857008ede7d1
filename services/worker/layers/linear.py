"""A linear layer whose weight may hold several of the checkpoint's, one below the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce

import torch

from services.worker.layers.linear_kernel import (
    LinearKernel,
    make_linear_kernel,
    make_quantized_kernel,
)
from services.worker.layers.native_linear import NativeLinear
from services.worker.native.library import Library
from services.worker.quantization.base import Quantize, QuantizedSlot, QuantizedWeight


class Linear:
    """One matrix product for one or several projections of the same input.

    Life: built empty, perhaps ``quantize``, its slots filled, ``finish_loading``, then called.

    Args:
        in_size: Elements of an input row.
        parts: Name → output elements of each projection, in the order of the output's columns.
        bias: Whether every projection has one.
        dtype: Of weights and activations.
        device: Where.
        is_gated: Of two equal parts, the first gates the second: called, it gives
            ``silu(first) * second``.
    """

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        is_gated: bool = False,
    ) -> None:
        out_size = sum(parts.values())
        self._parts = dict(parts)
        self._weight: torch.Tensor | None = torch.empty(
            out_size, in_size, dtype=dtype, device=device
        )
        self._bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None
        self._is_gated = is_gated
        self._dtype = dtype
        self._device = device
        self._in_size = in_size
        self._quantized: dict[str, QuantizedSlot] = {}
        self._kernel: LinearKernel | None = None

    def quantize(self, quantize: Quantize) -> None:
        """Keep the weight, which is yet to be loaded, in the form that ``quantize`` makes."""
        self._weight = None
        self._quantized = {
            name: QuantizedSlot((size, self._in_size), quantize, device=self._device)
            for name, size in self._parts.items()
        }

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor | QuantizedSlot]]:
        """Checkpoint name and place of each projection's weight and bias."""
        row = 0
        for name, size in self._parts.items():
            yield f"{prefix}{name}.weight", self._weight_slot(name, row)
            if self._bias is not None:
                yield f"{prefix}{name}.bias", self._bias[row : row + size]
            row += size

    def _weight_slot(self, name: str, first_row: int) -> torch.Tensor | QuantizedSlot:
        if self._quantized:
            return self._quantized[name]
        assert self._weight is not None, "slots are filled before finish_loading"
        return self._weight[first_row : first_row + self._parts[name]]

    def finish_loading(self, library: Library | None) -> None:
        """Hand the weight to the kernel for this dtype and device; other copies are let go."""
        assert self._kernel is None, "finish_loading is called once"
        if self._quantized:
            self._kernel = make_quantized_kernel(
                reduce(lambda above, below: above.above(below), self._taken()),
                self._bias,
                dtype=self._dtype,
                library=library,
                is_gated=self._is_gated,
            )
            return
        assert self._weight is not None, "it is there until finish_loading"
        self._kernel = make_linear_kernel(
            self._weight, self._bias, library=library, is_gated=self._is_gated
        )
        self._weight = None

    @property
    def native(self) -> NativeLinear:
        """The native kernel, where there is one."""
        assert isinstance(self._kernel, NativeLinear), "asked for only where all linears are native"
        return self._kernel

    def _taken(self) -> Iterator[QuantizedWeight]:
        return (self._quantized[name].take() for name in self._parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_size]`` → ``[num_tokens, out_size]``, half of that if gated."""
        assert self._kernel is not None, "finish_loading comes first"
        return self._kernel(x)
