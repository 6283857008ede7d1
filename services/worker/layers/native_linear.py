"""A linear layer computed by the native library over a weight packed once (csrc/gemm.h).

A row's result is equal to the bit whatever other rows there are.
"""

from __future__ import annotations

import weakref
from ctypes import c_int, c_int64, c_void_p

import torch

from services.worker.native.library import Library

DTYPES = (torch.bfloat16, torch.float32)


class NativeLinear:
    """Computes ``x @ weight.T + bias``; a gated one ``silu(gate) * up`` of the result's halves.

    The weight is copied: the caller drops the original.

    Attributes:
        name: For people.
        handle: Address of the native ``sl::Linear``, which lives as long as this object.
    """

    name = "native"

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        library: Library,
        is_gated: bool = False,
    ) -> None:
        """
        Args:
            weight: ``[out_size, in_size]``, bfloat16 or float32, on the CPU.
            bias: ``[out_size]`` of the same dtype, or none.
            library: Where the kernels are.
            is_gated: The weight is a gate's, and below it as many rows that it gates.

        Raises:
            MemoryError: No memory for the packed weight.
        """
        out_size, in_size = weight.shape
        create = library.function(
            "sl_linear_create", [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int], c_void_p
        )
        handle = create(
            weight.contiguous().data_ptr(),
            None if bias is None else bias.contiguous().data_ptr(),
            out_size,
            in_size,
            weight.dtype == torch.bfloat16,
            is_gated,
        )
        if handle is None:
            raise MemoryError(f"no memory to pack a weight of {out_size} x {in_size}")
        self.handle: int = handle
        destroy = library.function("sl_linear_destroy", [c_void_p])
        weakref.finalize(self, destroy, handle)
        self._run = library.function(
            "sl_linear_run_gated" if is_gated else "sl_linear_run",
            [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64],
        )
        self._lookup = library.function(
            "sl_linear_lookup", [c_void_p, c_void_p, c_int64, c_void_p, c_int64]
        )
        self._in_size = in_size
        self._out_size = out_size // 2 if is_gated else out_size
        self._dtype = weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, in_size]`` → ``[num_rows, out_size]``, half of that if gated."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), self._out_size, dtype=self._dtype)
        self._run(self.handle, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), self._out_size)
        return out

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: ``[num_ids]`` int64 → ``[num_ids, in_size]``; not of a gated one."""
        ids = ids.contiguous()
        out = torch.empty(len(ids), self._in_size, dtype=self._dtype)
        self._lookup(self.handle, ids.data_ptr(), len(ids), out.data_ptr(), self._in_size)
        return out
