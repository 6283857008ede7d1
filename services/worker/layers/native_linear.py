"""A linear layer computed by the native library over a weight packed once (csrc/gemm.h).

With a plain weight a row's result is equal to the bit whatever other rows there are. A quantized
one is multiplied as it is by up to eight rows and rounded to the rows' dtype for more, so there the
results of the two differ by roundings.
"""

from __future__ import annotations

import weakref
from ctypes import c_int, c_int64, c_void_p

import torch

from services.worker.native.library import Library
from services.worker.quantization.base import QuantizedWeight

DTYPES = (torch.bfloat16, torch.float32)


class NativeLinear:
    """Computes ``x @ weight.T + bias``; a gated one ``silu(gate) * up`` of the result's halves.

    Made by ``pack`` or ``pack_quantized``.

    Attributes:
        name: For people.
        handle: Address of the native ``sl::Linear``, which lives as long as this object.
    """

    name = "native"

    def __init__(
        self,
        handle: int | None,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        library: Library,
        is_gated: bool,
    ) -> None:
        """
        Args:
            handle: Of a native linear that this object shall own; ``None`` = it was not made.
            shape: Of its weight.
            dtype: Of rows and results.
            library: Whose it is.
            is_gated: See the class.

        Raises:
            MemoryError: It was not made.
        """
        out_size, self._in_size = shape
        if handle is None:
            raise MemoryError(f"no memory to pack a weight of {out_size} x {self._in_size}")
        self.handle = handle
        weakref.finalize(self, library.function("sl_linear_destroy", [c_void_p]), handle)
        self._run = library.function(
            "sl_linear_run_gated" if is_gated else "sl_linear_run",
            [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64],
        )
        self._lookup = library.function(
            "sl_linear_lookup", [c_void_p, c_void_p, c_int64, c_void_p, c_int64]
        )
        self._out_size = out_size // 2 if is_gated else out_size
        self._dtype = dtype

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        library: Library,
        is_gated: bool = False,
    ) -> NativeLinear:
        """Pack a copy of a weight; the caller drops the original.

        Args:
            weight: ``[out_size, in_size]``, bfloat16 or float32, on the CPU.
            bias: ``[out_size]`` of the same dtype, or none.
            library: Where the kernels are.
            is_gated: The weight is a gate's, and below it as many rows that it gates.

        Raises:
            MemoryError: There is none.
        """
        handle = _create(
            "sl_linear_create",
            (weight,),
            bias,
            weight.shape,
            dtype=weight.dtype,
            library=library,
            is_gated=is_gated,
        )
        return cls(handle, weight.shape, dtype=weight.dtype, library=library, is_gated=is_gated)

    @classmethod
    def pack_quantized(
        cls,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        library: Library,
        is_gated: bool = False,
    ) -> NativeLinear:
        """Pack a copy of a quantized weight.

        Args:
            weight: On the CPU.
            bias: As ``pack``.
            dtype: Of rows and results, bfloat16 or float32.
            library: As ``pack``.
            is_gated: As ``pack``.

        Raises:
            MemoryError: There is none.
        """
        handle = _create(
            weight.native_create,
            weight.native_arrays,
            bias,
            weight.shape,
            dtype=dtype,
            library=library,
            is_gated=is_gated,
        )
        return cls(handle, weight.shape, dtype=dtype, library=library, is_gated=is_gated)

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


def _create(
    function: str,
    arrays: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype,
    library: Library,
    is_gated: bool,
) -> int | None:
    """Call one of the functions that pack; they copy what they are given."""
    pointers = [c_void_p] * (len(arrays) + 1)
    create = library.function(function, [*pointers, c_int64, c_int64, c_int, c_int], c_void_p)
    contiguous = [array.contiguous() for array in arrays]
    flat_bias = None if bias is None else bias.contiguous()
    handle: int | None = create(
        *(array.data_ptr() for array in contiguous),
        None if flat_bias is None else flat_bias.data_ptr(),
        *shape,
        dtype == torch.bfloat16,
        is_gated,
    )
    return handle
