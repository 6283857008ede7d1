"""Attention of the native CPU library: walks the block table in place, never copies the context.

In float32 a token's result depends on its own query, keys and values only, bit for bit: not on
what shares the batch, nor on how its prompt was cut into chunks. In bfloat16 on AMX it does not
depend on other requests, but on the chunks it does.
"""

from __future__ import annotations

import ctypes

import torch

from services.common.errors import ConfigError
from services.worker.attention.base import AttentionBatch, AttentionSpec
from services.worker.native.library import Library

DTYPES = (torch.float32, torch.bfloat16)


class AttentionArguments(ctypes.Structure):
    """``sl::Attention`` of csrc/attention.h, field by field."""

    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("num_reqs", ctypes.c_int32),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("slot_mapping", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key", ctypes.c_void_p),
        ("key_stride", ctypes.c_int64),
        ("value", ctypes.c_void_p),
        ("value_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int32),
    )


def build(spec: AttentionSpec) -> NativeCpuBackend:
    """Make the backend for one model.

    Raises:
        ConfigError: There is no native library, or it lacks the dtype.
    """
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"native_cpu: {spec.num_heads} query heads are no multiple of"
            f" {spec.num_kv_heads} KV heads"
        )
    if spec.dtype not in DTYPES:
        raise ConfigError(f"native_cpu: dtype {spec.dtype} is not supported")
    if spec.library is None:
        raise ConfigError("native_cpu: there is no native library here; use torch_sdpa")
    return NativeCpuBackend(spec, spec.library)


class NativeCpuBackend:
    """Makes a ``NativeCpuStep`` of each batch."""

    def __init__(self, spec: AttentionSpec, library: Library) -> None:
        self._spec = spec
        self._attend = library.function("sl_attend", [ctypes.POINTER(AttentionArguments)])

    def begin_step(self, batch: AttentionBatch) -> NativeCpuStep:
        """Note where the batch lies; the plan is made in the library."""
        return NativeCpuStep(self._spec, batch, self._attend)


class NativeCpuStep:
    """Attention over one batch.

    Attributes:
        arguments: What the library is told of the batch; ``attend`` fills in the layer.
    """

    def __init__(self, spec: AttentionSpec, batch: AttentionBatch, attend: ctypes._FuncPointer):
        # The arguments hold addresses only: what lies there lives as long as the batch.
        self._batch = batch
        self._attend = attend
        self._dtype = spec.dtype
        self.arguments = AttentionArguments(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            block_size=spec.block_size,
            is_bf16=spec.dtype == torch.bfloat16,
            num_reqs=batch.num_reqs,
            query_start_loc=batch.query_start_loc.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            block_table=batch.block_table.data_ptr(),
            block_table_stride=batch.block_table.stride(0),
            slot_mapping=batch.slot_mapping.data_ptr(),
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See ``AttentionStep.attend``."""
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        query, key, value = (_with_dense_tokens(t, self._dtype) for t in (query, key, value))
        arguments = self.arguments
        arguments.keys = kv_cache.data_ptr()
        arguments.values = kv_cache.data_ptr() + kv_cache.stride(0) * kv_cache.itemsize
        arguments.query, arguments.query_stride = query.data_ptr(), query.stride(0)
        arguments.key, arguments.key_stride = key.data_ptr(), key.stride(0)
        arguments.value, arguments.value_stride = value.data_ptr(), value.stride(0)
        arguments.out, arguments.out_stride = output.data_ptr(), output.stride(0)
        arguments.scale, arguments.window = scale, sliding_window or 0
        self._attend(arguments)
        return output


def _with_dense_tokens(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[num_tokens, heads, size]`` whose heads lie one after the other inside a token."""
    if heads.dtype != dtype:
        raise ConfigError(f"native_cpu: made for {dtype}, called with {heads.dtype}")
    if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]:
        return heads
    return heads.contiguous()
