"""Shape, size and allocation of the KV cache."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from services.common.errors import ConfigError
from services.worker.kv_cache.allocation import allocate
from services.worker.kv_cache.spec import KvCacheSpec

SPEC = KvCacheSpec(num_layers=3, num_kv_heads=2, head_size=8, block_size=16, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def test_a_block_takes_the_bytes_that_are_allocated_for_it() -> None:
    caches = allocate(SPEC, 10, device=CPU)
    assert sum(cache.nbytes for cache in caches) == 10 * SPEC.block_size_bytes


def test_only_whole_blocks_count() -> None:
    size = SPEC.block_size_bytes
    assert [SPEC.num_blocks_in(size_bytes) for size_bytes in (0, size - 1, size, 5 * size + 1)] == [
        0,
        0,
        1,
        5,
    ]


def test_one_tensor_per_layer_filled_with_zeros() -> None:
    caches = allocate(SPEC, 4, device=CPU)
    assert [tuple(cache.shape) for cache in caches] == [(2, 4, 16, 2, 8)] * 3
    assert all(cache.dtype == torch.bfloat16 and not cache.any() for cache in caches)


def test_blocks_take_no_memory_before_they_are_used() -> None:
    before = resident_bytes()
    caches = allocate(SPEC, 20_000, device=CPU)
    size_bytes = sum(cache.nbytes for cache in caches)
    assert size_bytes > 50 << 20
    assert resident_bytes() - before < size_bytes / 4
    caches[0][:] = 1.0
    assert resident_bytes() - before > 0.8 * caches[0].nbytes


def resident_bytes() -> int:
    """Memory of this process."""
    match = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None
    return int(match[1]) * 1024


def test_a_pool_of_only_the_null_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 KV blocks"):
        allocate(SPEC, 1, device=CPU)


def test_memory_that_cannot_be_had_is_named_in_bytes() -> None:
    num_blocks = 1 << 40
    size_bytes = num_blocks * SPEC.block_size_bytes
    with pytest.raises(ConfigError, match=f"cannot allocate {size_bytes} bytes"):
        allocate(SPEC, num_blocks, device=CPU)
