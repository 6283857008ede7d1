"""How a linear layer is computed, chosen once its weight is final.

On a CPU the native library's products are used where there is one. Without it, oneDNN with a
weight reordered once beats ``F.linear`` in bfloat16 (which reorders on every call): about half its
time for up to 64 rows, level at several hundred, the results equal to the bit.

Native against oneDNN-packed, all linears of SmolLM2-135M, one thread, AMX, the least time of each
in one run: 0.6 at 1 row, 0.7 at 32, 0.9 to 1.0 at 64 and 256; with two threads on two shared cores
oneDNN's barriers cost several times that. oneDNN is ahead with a thousand rows and a quiet machine,
but a second copy of the weights for those is not worth its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch.nn import functional

from services.worker.layers.activation import silu_and_mul
from services.worker.layers.native_linear import DTYPES as NATIVE_DTYPES
from services.worker.layers.native_linear import NativeLinear
from services.worker.layers.quantized_linear import QuantizedLinear
from services.worker.native.library import Library
from services.worker.quantization.base import QuantizedWeight

Lookup = Callable[[torch.Tensor], torch.Tensor]
"""Rows of a weight: ``[num_ids]`` int64 → ``[num_ids, in_size]``."""


class LinearKernel(Protocol):
    """Computes ``x @ weight.T + bias`` for a weight that it holds.

    Attributes:
        name: For people.
    """

    name: str

    @property
    def lookup(self) -> Lookup | None:
        """Gives rows of the weight, where the kernel's form of it allows."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, in_size]`` → ``[num_rows, out_size]``."""
        ...


class PlainLinear:
    """``F.linear`` over the weight as loaded."""

    name = "plain"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """``[num_ids]`` int64 → ``[num_ids, in_size]``."""
        return functional.embedding(ids, self._weight)


class PackedLinear:
    """oneDNN over a copy of the weight in its own order; the caller drops the original."""

    name = "onednn_packed"
    lookup = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._run(x, self._packed, self._bias, "none", [], "")
        return result


class GatedLinear:
    """``silu(gate) * up`` of the two halves that another kernel computes."""

    lookup = None

    def __init__(self, kernel: LinearKernel) -> None:
        self._kernel = kernel
        self.name = kernel.name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(self._kernel(x))


def make_linear_kernel(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    library: Library | None,
    is_gated: bool = False,
) -> LinearKernel:
    """Build the best kernel for a final weight.

    Args:
        weight: ``[out_size, in_size]``; a kernel that packs holds a copy, so drop it afterwards.
        bias: ``[out_size]``, or none.
        library: Native kernels, where there are any.
        is_gated: The upper half of the weight is a gate for the lower: the result is
            ``silu(gate) * up``, of half the size.
    """
    if library is not None and has_native_linear(weight.dtype, weight.device):
        return NativeLinear.pack(weight, bias, library=library, is_gated=is_gated)
    kernel = torch_linear_for(weight.dtype, weight.device)(weight, bias)
    return GatedLinear(kernel) if is_gated else kernel


def make_quantized_kernel(
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    library: Library | None,
    is_gated: bool = False,
) -> LinearKernel:
    """Build the best kernel for a quantized weight; drop the weight afterwards.

    Args:
        weight: Where the rows will be.
        bias: As ``make_linear_kernel``.
        dtype: Of rows and results.
        library: As ``make_linear_kernel``.
        is_gated: As ``make_linear_kernel``.
    """
    if library is not None and has_native_linear(dtype, weight.native_arrays[0].device):
        return NativeLinear.pack_quantized(
            weight, bias, dtype=dtype, library=library, is_gated=is_gated
        )
    kernel = QuantizedLinear(weight, bias, dtype=dtype)
    return GatedLinear(kernel) if is_gated else kernel


def linear_kernel_name(
    dtype: torch.dtype, device: torch.device, *, library: Library | None, is_quantized: bool = False
) -> str:
    """Name of the kernel that ``make_linear_kernel`` or ``make_quantized_kernel`` builds."""
    if library is not None and has_native_linear(dtype, device):
        return NativeLinear.name
    if is_quantized:
        return QuantizedLinear.name
    return torch_linear_for(dtype, device).name


def has_native_linear(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native library computes weights of ``dtype`` on ``device``."""
    return device.type == "cpu" and dtype in NATIVE_DTYPES


def torch_linear_for(
    dtype: torch.dtype, device: torch.device
) -> type[PackedLinear] | type[PlainLinear]:
    """The kernel for weights of ``dtype`` on ``device`` where the native library has none."""
    if device.type == "cpu" and dtype == torch.bfloat16 and packing_is_exact():
        return PackedLinear
    return PlainLinear


@cache
def packing_is_exact() -> bool:
    """Whether this machine's oneDNN computes packed bfloat16 linears as exactly as ``F.linear``.

    The operators are private to torch: their presence and their results are checked rather than
    assumed. Exact means: no further from the float64 product than one bfloat16 rounding.
    """
    if not torch._C._has_mkldnn or not _cpu_has_bf16():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 160, generator=generator).bfloat16()
    bias = torch.randn(96, generator=generator).bfloat16()
    x = torch.randn(5, 160, generator=generator).bfloat16()
    exact = x.double() @ weight.double().T + bias.double()
    error = (PackedLinear(weight, bias)(x).double() - exact).abs()
    tolerance = exact.abs() * 2.0**-8 + 1e-3
    return bool((error <= tolerance).all())


def _cpu_has_bf16() -> bool:
    operators = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(operators, name) for name in names) and bool(
        operators._is_mkldnn_bf16_supported()
    )
