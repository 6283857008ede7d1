"""How the KV pool is sized, and what is said when nothing fits."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.errors import ConfigError
from services.worker.kv_cache.spec import KvCacheSpec
from services.worker.runner import memory
from services.worker.runner.build import RunnerOptions, _profile_lengths, build_runner
from services.worker.runner.memory import MemoryLimits, free_cpu_bytes, size_pool

SPEC = KvCacheSpec(num_layers=2, num_kv_heads=2, head_size=8, block_size=4, dtype=torch.float32)
BLOCK_BYTES = 2 * 2 * 4 * 2 * 8 * 4
LIMITS = MemoryLimits(
    num_blocks_override=None,
    kv_cache_bytes=None,
    share=None,
    max_model_len=None,
    model_max_len=100,
    max_num_seqs=8,
)


def test_free_memory_becomes_blocks() -> None:
    pool = size_pool(SPEC, LIMITS, free_bytes=50 * BLOCK_BYTES + 1)
    assert (pool.num_blocks, pool.max_model_len, pool.is_shortened) == (50, 100, False)


def test_no_more_blocks_than_all_rows_could_use() -> None:
    pool = size_pool(SPEC, LIMITS, free_bytes=10**12)
    assert pool.num_blocks == 8 * 25 + 1


def test_kv_cache_memory_bytes_beats_what_is_free() -> None:
    pool = size_pool(SPEC, replace(LIMITS, kv_cache_bytes=30 * BLOCK_BYTES), free_bytes=10**12)
    assert pool.num_blocks == 30


def test_num_gpu_blocks_override_beats_everything() -> None:
    limits = replace(LIMITS, num_blocks_override=26, kv_cache_bytes=10**9)
    assert size_pool(SPEC, limits, free_bytes=0).num_blocks == 26


def test_a_length_that_was_asked_for_and_does_not_fit_is_an_error_with_the_fix() -> None:
    limits = replace(LIMITS, max_model_len=90, kv_cache_bytes=21 * BLOCK_BYTES)
    with pytest.raises(ConfigError) as caught:
        size_pool(SPEC, limits, free_bytes=0)
    assert "--max-model-len to at most 80" in caught.value.message
    needed = 24 * BLOCK_BYTES
    assert f"--kv-cache-memory-bytes to at least {needed}" in caught.value.message
    # What the message says works.
    assert size_pool(SPEC, replace(limits, max_model_len=80), free_bytes=0).max_model_len == 80
    enough = replace(limits, kv_cache_bytes=needed)
    assert size_pool(SPEC, enough, free_bytes=0).max_model_len == 90


def test_blocks_that_were_set_may_hold_less_than_the_length_that_was_set() -> None:
    limits = replace(LIMITS, max_model_len=90, num_blocks_override=21)
    pool = size_pool(SPEC, limits, free_bytes=0)
    assert (pool.max_model_len, pool.num_fitting, pool.is_shortened) == (90, 80, False)


def test_the_models_own_limit_is_shortened_to_the_cache_and_says_so() -> None:
    pool = size_pool(SPEC, replace(LIMITS, num_blocks_override=11), free_bytes=0)
    assert (pool.max_model_len, pool.is_shortened) == (40, True)


@pytest.mark.parametrize("max_model_len", [None, 90, 3])
def test_a_cache_without_room_for_one_token_is_an_error_with_advice_that_works(
    max_model_len: int | None,
) -> None:
    limits = replace(LIMITS, max_model_len=max_model_len, kv_cache_bytes=1000)
    with pytest.raises(ConfigError) as caught:
        size_pool(SPEC, limits, free_bytes=0)
    found = re.search(
        r"--kv-cache-memory-bytes to at least (\d+) for sequences of (\d+) tokens; the least that "
        r"works is (\d+), with --max-model-len (\d+)$",
        caught.value.message,
    )
    assert found is not None, caught.value.message
    full_bytes, full_len, least_bytes, least_len = map(int, found.groups())
    full = size_pool(SPEC, replace(limits, kv_cache_bytes=full_bytes), free_bytes=0)
    assert full.max_model_len == full_len == (max_model_len or 100)
    least = replace(limits, kv_cache_bytes=least_bytes, max_model_len=least_len)
    assert size_pool(SPEC, least, free_bytes=0).max_model_len == least_len
    with pytest.raises(ConfigError):
        size_pool(SPEC, replace(least, kv_cache_bytes=least_bytes - 1), free_bytes=0)


def test_no_memory_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        size_pool(SPEC, LIMITS, free_bytes=-5)


def test_the_profile_step_fills_the_budget_and_lets_as_many_rows_sample_as_can() -> None:
    assert _profile_lengths(budget=100, max_rows=8, max_len=1000) == [*[1] * 7, 93]
    assert _profile_lengths(budget=100, max_rows=8, max_len=40) == [*[1] * 5, 40, 40, 15]
    assert _profile_lengths(budget=4, max_rows=8, max_len=40) == [1, 1, 1, 1]
    assert sum(_profile_lengths(budget=2048, max_rows=256, max_len=512)) == 2048


def test_the_bound_of_a_step_on_a_cpu_holds_and_is_not_far_off(tiny_dir: Path) -> None:
    """The largest step of a model, in a process whose peak says what it allocated."""
    source = f"""
import re, torch
from pathlib import Path
from services.worker.kv_cache.spec import KvCacheSpec
from services.worker.runner import build
from services.worker.runner.memory import step_bytes_on_cpu

def status(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

loaded = build.load_model(
    Path({str(tiny_dir)!r}), dtype="float32", device=torch.device("cpu"),
    attention_backend="torch_sdpa", block_size=16, report=lambda done, total: None,
)
options = build.RunnerOptions(
    model_dir=Path(), dtype="", device=torch.device("cpu"), attention_backend="",
    block_size=16, num_gpu_blocks_override=None, kv_cache_memory_bytes=None,
    gpu_memory_utilization=None, max_model_len=128, max_num_seqs=512,
    max_num_batched_tokens=16384, pipeline_depth=1,
)
spec = KvCacheSpec.of(loaded.config, block_size=16, dtype=loaded.dtype)
build._run_full_step(options, loaded, spec)  # what is loaded and made once
peaks = []
for _ in range(4):  # the least of some: what the allocator keeps or wastes comes on top
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    build._run_full_step(options, loaded, spec)
    peaks.append(status("VmHWM") - before)
print(min(peaks))
print(step_bytes_on_cpu(loaded.config, dtype=loaded.dtype, num_tokens=16384, num_rows=512))
print(spec.block_size_bytes * 16384 // 16)
"""
    printed = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True
    ).stdout
    used, bound, cache = map(int, printed.splitlines()[-3:])
    assert used - cache < bound < 4 * used, printed


def test_the_default_on_a_cpu_leaves_most_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_machine_memory", lambda: (16 << 30, 8 << 30))
    assert free_cpu_bytes(peak_bytes=0, share=None) == 2 << 30
    monkeypatch.setattr(memory, "_machine_memory", lambda: (512 << 30, 500 << 30))
    assert free_cpu_bytes(peak_bytes=0, share=None) == memory.CPU_MAX_BYTES
    # A share that the user gave counts from the whole machine, and never exceeds what is free.
    assert free_cpu_bytes(peak_bytes=1 << 30, share=0.5) > 200 << 30
    monkeypatch.setattr(memory, "_machine_memory", lambda: (16 << 30, 1 << 30))
    assert free_cpu_bytes(peak_bytes=0, share=0.9) == 1 << 30


def test_a_runner_is_built_from_a_directory(tiny_dir: Path) -> None:
    phases = []
    options = RunnerOptions(
        model_dir=tiny_dir,
        dtype="auto",
        device=torch.device("cpu"),
        attention_backend="torch_sdpa",
        block_size=16,
        num_gpu_blocks_override=33,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=None,
        max_model_len=None,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        pipeline_depth=2,
    )
    runner, _, facts = build_runner(options, report=lambda progress: phases.append(progress.phase))
    assert runner.num_rows == 0
    assert (facts.num_blocks, facts.max_model_len) == (33, 512)
    assert facts.max_num_seqs == 4
    assert (facts.vocab_size, facts.eos_token_ids) == (320, (2,))
    assert list(dict.fromkeys(phases)) == ["weights", "profile", "kv_cache"]
    with pytest.raises(ConfigError, match="at most 1024"):
        build_runner(replace(options, max_model_len=1025), report=lambda progress: None)
