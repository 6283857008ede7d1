"""How many KV blocks there are and how long a sequence may be, from what a step and others need.

What activations need beside weights and KV blocks is measured on a GPU, by one step with the full
token budget, as every byte is wanted there. On a CPU, where three quarters of the memory are left
to others, it is computed: that step would be the longest part of the start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.errors import ConfigError
from services.worker.kv_cache.spec import KvCacheSpec
from services.worker.models.base import ModelConfig

CUDA_SHARE = 0.92
CPU_SHARE_OF_FREE = 0.25
CPU_MAX_BYTES = 4 << 30
"""Default ceiling of the KV cache on the CPU: the machine has other work to do."""
_FLOAT_BYTES = 4
_FLOATS_PER_LOGIT = 8
"""float32 copies of the logits that a row needs which is drawn with every transform."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What the settings say.

    Attributes:
        num_blocks_override: Blocks, whatever memory there is.
        kv_cache_bytes: Size of the cache, whatever memory there is.
        share: Share of the device's memory that the worker may fill; ``None`` = the device's
            default.
        max_model_len: ``None`` = the model's limit, or less if the cache is smaller.
        model_max_len: The model's limit.
        max_num_seqs: Rows.
    """

    num_blocks_override: int | None
    kv_cache_bytes: int | None
    share: float | None
    max_model_len: int | None
    model_max_len: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The outcome.

    Attributes:
        num_blocks: Null block included.
        max_model_len: Most tokens of one sequence.
        is_shortened: ``max_model_len`` is below the model's limit because the cache is.
        num_fitting: Tokens of the longest sequence that the cache holds, which may be fewer than
            ``max_model_len`` if both were set: what needs more is refused when it comes.
    """

    num_blocks: int
    max_model_len: int
    is_shortened: bool
    num_fitting: int


def size_pool(spec: KvCacheSpec, limits: MemoryLimits, *, free_bytes: int) -> Pool:
    """Decide the number of blocks and the longest sequence.

    Args:
        spec: Size of a block.
        limits: The settings.
        free_bytes: What the KV cache may take if no setting says so.

    Raises:
        ConfigError: One sequence of ``max_model_len`` does not fit into the cache, whose number of
            blocks was not set; says what to set instead.
    """
    wanted_len = limits.max_model_len or limits.model_max_len
    num_blocks = _num_blocks(spec, limits, free_bytes=free_bytes, wanted_len=wanted_len)
    fitting_len = max(num_blocks - 1, 0) * spec.block_size
    if fitting_len >= wanted_len:
        return Pool(num_blocks, wanted_len, is_shortened=False, num_fitting=fitting_len)
    if limits.max_model_len is None and fitting_len > 0:
        return Pool(num_blocks, fitting_len, is_shortened=True, num_fitting=fitting_len)
    if limits.num_blocks_override is not None and fitting_len > 0:
        return Pool(num_blocks, wanted_len, is_shortened=False, num_fitting=fitting_len)
    raise ConfigError(_advice(spec, fitting_len=fitting_len, wanted_len=wanted_len))


def free_cpu_bytes(*, peak_bytes: int, share: float | None) -> int:
    """What the KV cache may take on this machine.

    Args:
        peak_bytes: Extra memory of the largest step.
        share: Share of the machine's memory that the worker may fill; ``None`` = a quarter of what
            is free, at most ``CPU_MAX_BYTES``.
    """
    total, available = _machine_memory()
    if share is None:
        return min(int(CPU_SHARE_OF_FREE * (available - peak_bytes)), CPU_MAX_BYTES)
    return min(int(share * total) - _status_bytes("VmRSS"), available) - peak_bytes


def free_cuda_bytes(device: torch.device, *, peak_bytes: int, share: float | None) -> int:
    """What the KV cache may take on a GPU.

    Args:
        device: Which.
        peak_bytes: Extra memory of the largest step.
        share: Share of the GPU's memory that the worker may fill; ``None`` = ``CUDA_SHARE``.
    """
    free, total = torch.cuda.mem_get_info(device)
    usable = int((CUDA_SHARE if share is None else share) * total)
    return usable - int(total - free) - peak_bytes


def cuda_peak_of(device: torch.device, run: Callable[[], None]) -> int:
    """Extra bytes of a GPU that ``run``, the largest step, needed at its peak."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak_bytes = int(torch.cuda.max_memory_allocated(device)) - before
    # What the allocator keeps of it for later would count as used, so twice.
    torch.cuda.empty_cache()
    return peak_bytes


def step_bytes_on_cpu(
    config: ModelConfig, *, dtype: torch.dtype, num_tokens: int, num_rows: int
) -> int:
    """An upper bound of what a step allocates on the CPU.

    Args:
        config: The model.
        dtype: Of the activations.
        num_tokens: Tokens of the largest step.
        num_rows: Rows that sample in it.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    attended = config.head_size * (config.num_heads + config.num_kv_heads)
    # Residual, normed and added up; q, k, v before and after rotation, and what they become; gate,
    # up and their product. A norm computes in float32.
    elements = 3 * hidden + 2 * 2 * attended + 3 * inner
    per_token = elements * int(dtype.itemsize) + 2 * hidden * _FLOAT_BYTES
    per_row = config.vocab_size * _FLOATS_PER_LOGIT * _FLOAT_BYTES
    return num_tokens * per_token + num_rows * per_row


def _num_blocks(
    spec: KvCacheSpec, limits: MemoryLimits, *, free_bytes: int, wanted_len: int
) -> int:
    if limits.num_blocks_override is not None:
        return limits.num_blocks_override
    if limits.kv_cache_bytes is not None:
        return spec.num_blocks_in(limits.kv_cache_bytes)
    # More than all rows at full length could use is never needed.
    most = limits.max_num_seqs * -(-wanted_len // spec.block_size) + 1
    return min(spec.num_blocks_in(max(free_bytes, 0)), most)


def _advice(spec: KvCacheSpec, *, fitting_len: int, wanted_len: int) -> str:
    needed_bytes = (-(-wanted_len // spec.block_size) + 1) * spec.block_size_bytes
    if fitting_len > 0:
        return (
            f"the KV cache holds {fitting_len} tokens, fewer than max_model_len={wanted_len}: set "
            f"--max-model-len to at most {fitting_len}, or --kv-cache-memory-bytes to at least "
            f"{needed_bytes}"
        )
    least_len = min(spec.block_size, wanted_len)
    return (
        f"the KV cache has no room for a single token: set --kv-cache-memory-bytes to at least "
        f"{needed_bytes} for sequences of {wanted_len} tokens; the least that works is "
        f"{2 * spec.block_size_bytes}, with --max-model-len {least_len}"
    )


def _status_bytes(field: str) -> int:
    """A memory figure of this process."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(match.group(1)) * 1024 if match else 0


def _machine_memory() -> tuple[int, int]:
    """Bytes of memory in all and free, as far as this container may have them."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M)
        available = int(match.group(1)) * 1024 if match else available
    limit = _cgroup_number("memory.max")
    if limit is not None and limit < total:
        used = _cgroup_number("memory.current") or 0
        total, available = limit, min(available, limit - used)
    return total, available


def _cgroup_number(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
