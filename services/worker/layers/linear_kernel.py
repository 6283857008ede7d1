"""How a linear layer is computed, chosen once its weight is final.

oneDNN with a weight reordered once beats ``F.linear`` on a CPU in bfloat16 (which reorders on every
call): about half its time for up to 64 rows, level at several hundred, the results equal to the
bit. In float32 plain ``F.linear`` is used: it is what equality tests compare with.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch.nn import functional

from services.worker.native.library import Library


class LinearKernel(Protocol):
    """Computes ``x @ weight.T + bias`` for a weight that it holds."""

    name: str

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


class PackedLinear:
    """oneDNN over a copy of the weight in its own order; the caller drops the original."""

    name = "onednn_packed"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._run(x, self._packed, self._bias, "none", [], "")
        return result


def make_linear_kernel(
    weight: torch.Tensor, bias: torch.Tensor | None, *, library: Library | None
) -> LinearKernel:
    """Build the best kernel for a final weight.

    Args:
        weight: ``[out_size, in_size]``; a kernel that packs holds a copy, so drop it afterwards.
        bias: ``[out_size]``, or none.
        library: Native kernels, where there are any.
    """
    return linear_kernel_for(weight.dtype, weight.device)(weight, bias)


def linear_kernel_for(
    dtype: torch.dtype, device: torch.device
) -> type[PackedLinear] | type[PlainLinear]:
    """The kernel for weights of ``dtype`` on ``device``."""
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
