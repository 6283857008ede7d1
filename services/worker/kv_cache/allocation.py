"""Allocates the paged KV tensors, once, at start."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from services.common.errors import ConfigError
from services.worker.kv_cache.spec import KvCacheSpec


def allocate(spec: KvCacheSpec, num_blocks: int, *, device: torch.device) -> list[torch.Tensor]:
    """Allocate the cache, filled with zeros.

    Zeros, because what masking hides is still multiplied: memory that happened to hold NaN would
    poison every row that is padded with the null block (id 0, which nobody writes).

    Args:
        spec: Shape of the cache.
        num_blocks: Blocks, the null block included; at least 2.
        device: Where.

    Returns:
        One tensor per layer, ``[2, num_blocks, block_size, num_kv_heads, head_size]``.

    Raises:
        ConfigError: Fewer than 2 blocks, or the memory cannot be had.
    """
    if num_blocks < 2:
        raise ConfigError(
            f"{num_blocks} KV blocks: one is the null block, so at least 2 are needed"
        )
    shape = spec.layer_shape(num_blocks)
    try:
        return [_zeros(shape, dtype=spec.dtype, device=device) for _ in range(spec.num_layers)]
    except (RuntimeError, OSError) as exc:  # torch's allocators raise nothing more exact
        size_bytes = num_blocks * spec.block_size_bytes
        raise ConfigError(f"cannot allocate {size_bytes} bytes of KV cache: {exc}") from exc


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The kernel zeroes a page when it is first touched: blocks that nobody has used yet take no
    # memory, and gigabytes of them no time at start. It refuses what the machine never has.
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE)
    # A decode reads blocks from all over the cache: with small pages most of its time would go into
    # finding them.
    with contextlib.suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
