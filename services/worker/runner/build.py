"""From settings to a runner that is ready: load, profile, size and allocate the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from services.common.errors import ConfigError
from services.common.sampling import SamplingParams
from services.common.telemetry import get_logger
from services.worker.kv_cache.allocation import allocate
from services.worker.kv_cache.spec import KvCacheSpec
from services.worker.loader.load_model import LoadedModel, load_model
from services.worker.native.isa import IsaSetting
from services.worker.native.library import load_library
from services.worker.runner.memory import (
    MemoryLimits,
    Pool,
    cuda_peak_of,
    free_cpu_bytes,
    free_cuda_bytes,
    size_pool,
    step_bytes_on_cpu,
)
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.step_input import NewRow, Step
from services.worker.sampling.grammar_compiler import GrammarCompiler

log = get_logger(__name__)
_NO_IDS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What a runner is built from; the fields are those of ``WorkerConfig``."""

    model_dir: Path
    dtype: str
    device: torch.device
    attention_backend: str
    block_size: int
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int
    cpu_isa: IsaSetting = "auto"
    quantization: str | None = None
    num_threads: int | None = None

    @property
    def num_rows(self) -> int:
        """Requests that can run at once: each needs at least one token of the budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What was discovered.

    Attributes:
        num_blocks: KV blocks, the null block included.
        block_size: Tokens of one.
        max_model_len: Most tokens of one sequence.
        max_num_seqs: Rows.
        max_num_batched_tokens: Most tokens of one step.
        pipeline_depth: Most steps in flight.
        vocab_size: Width of the logits.
        eos_token_ids: All of them.
        device: For people ("cpu").
        dtype: For people ("bfloat16").
        kv_cache_bytes: Size of the KV cache.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the build is.

    Attributes:
        phase: "weights", "profile" or "kv_cache".
        done_bytes: Of ``total_bytes``; both 0 where bytes mean nothing.
        total_bytes: See ``done_bytes``.
    """

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0

    @property
    def fraction(self) -> float:
        """0 to 1 of the phase."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0


class Built(NamedTuple):
    """A runner that is ready, what compiles grammars for it, and what was discovered."""

    runner: ModelRunner
    compiler: GrammarCompiler
    facts: RunnerFacts


def resolve_device(name: str) -> torch.device:
    """The device that a setting means.

    Args:
        name: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device=cuda, but torch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def build_runner(options: RunnerOptions, *, report: Callable[[Progress], None]) -> Built:
    """Build a runner; takes seconds to minutes.

    Args:
        options: The settings.
        report: Told how far it is.

    Raises:
        ConfigError: The model, the device or the memory is not what the settings need.
    """
    library = None
    if options.device.type == "cpu":
        library = load_library(options.cpu_isa, num_threads=options.num_threads)
    loaded = load_model(
        options.model_dir,
        dtype=options.dtype,
        device=options.device,
        attention_backend=options.attention_backend,
        block_size=options.block_size,
        report=lambda done, total: report(Progress("weights", done, total)),
        library=library,
        quantization=options.quantization,
    )
    spec = KvCacheSpec.of(loaded.config, block_size=options.block_size, dtype=loaded.dtype)
    report(Progress("profile"))
    pool = _size_pool(options, loaded, spec)
    report(Progress("kv_cache"))
    runner = ModelRunner(
        loaded,
        kv_caches=allocate(spec, pool.num_blocks, device=options.device),
        max_num_seqs=options.num_rows,
        max_model_len=pool.max_model_len,
        block_size=options.block_size,
        device=options.device,
    )
    # The first step of a process pays for kernels and buffers; no request shall.
    runner.execute(_profile_step([1], [1]))
    runner.reset()
    facts = RunnerFacts(
        num_blocks=pool.num_blocks,
        block_size=options.block_size,
        max_model_len=pool.max_model_len,
        max_num_seqs=options.num_rows,
        max_num_batched_tokens=options.max_num_batched_tokens,
        pipeline_depth=options.pipeline_depth,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        device=options.device.type,
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_cache_bytes=pool.num_blocks * spec.block_size_bytes,
    )
    compiler = GrammarCompiler(
        options.model_dir / "tokenizer.json",
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
    )
    return Built(runner, compiler, facts)


def _size_pool(options: RunnerOptions, loaded: LoadedModel, spec: KvCacheSpec) -> Pool:
    model_max_len = loaded.config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > model_max_len:
        raise ConfigError(
            f"max_model_len={options.max_model_len} is more than the model was made for: set "
            f"--max-model-len to at most {model_max_len}"
        )
    limits = MemoryLimits(
        num_blocks_override=options.num_gpu_blocks_override,
        kv_cache_bytes=options.kv_cache_memory_bytes,
        share=options.gpu_memory_utilization,
        max_model_len=options.max_model_len,
        model_max_len=model_max_len,
        max_num_seqs=options.num_rows,
    )
    is_size_given = limits.num_blocks_override or limits.kv_cache_bytes
    free_bytes = 0 if is_size_given else _free_bytes(options, loaded, spec)
    pool = size_pool(spec, limits, free_bytes=free_bytes)
    log.info(
        "kv_cache_sized",
        num_blocks=pool.num_blocks,
        num_tokens=(pool.num_blocks - 1) * spec.block_size,
        size_bytes=pool.num_blocks * spec.block_size_bytes,
    )
    if pool.is_shortened:
        log.warning(
            "max_model_len_shortened",
            max_model_len=pool.max_model_len,
            model_max_len=model_max_len,
            reason="the KV cache holds no longer sequence; give --kv-cache-memory-bytes more",
        )
    elif pool.num_fitting < pool.max_model_len:
        log.warning(
            "kv_cache_smaller_than_context",
            num_tokens=pool.num_fitting,
            max_model_len=pool.max_model_len,
            reason="as set; requests that need more than the KV cache holds are refused",
        )
    return pool


def _free_bytes(options: RunnerOptions, loaded: LoadedModel, spec: KvCacheSpec) -> int:
    """What the KV cache may take beside weights and the largest step."""
    share = options.gpu_memory_utilization
    if options.device.type == "cuda":
        peak_bytes = cuda_peak_of(options.device, lambda: _run_full_step(options, loaded, spec))
        log.info("step_profiled", peak_bytes=peak_bytes)
        return free_cuda_bytes(options.device, peak_bytes=peak_bytes, share=share)
    peak_bytes = step_bytes_on_cpu(
        loaded.config,
        dtype=loaded.dtype,
        num_tokens=options.max_num_batched_tokens,
        num_rows=options.max_num_seqs,
    )
    return free_cpu_bytes(peak_bytes=peak_bytes, share=share)


def _run_full_step(options: RunnerOptions, loaded: LoadedModel, spec: KvCacheSpec) -> None:
    """One step with the whole token budget and as many rows sampling as can."""
    model_len = options.max_model_len or loaded.config.max_position_embeddings
    lengths = _profile_lengths(
        budget=options.max_num_batched_tokens, max_rows=options.num_rows, max_len=model_len
    )
    blocks = [-(-length // spec.block_size) for length in lengths]
    runner = ModelRunner(
        loaded,
        kv_caches=allocate(spec, sum(blocks) + 1, device=options.device),
        max_num_seqs=len(lengths),
        max_model_len=max(lengths),
        block_size=spec.block_size,
        device=options.device,
    )
    runner.execute(_profile_step(lengths, blocks))


def _profile_lengths(*, budget: int, max_rows: int, max_len: int) -> list[int]:
    """Prompts that fill the budget: many of one token, so that many sample, the others long."""
    num_long = min(-(-budget // max_len), max_rows)
    lengths = [1] * max(min(max_rows, budget) - num_long, 0)
    rest = budget - len(lengths)
    while rest > 0 and len(lengths) < max_rows:
        lengths.append(min(rest, max_len))
        rest -= lengths[-1]
    return lengths


def _profile_step(lengths: list[int], blocks: list[int]) -> Step:
    # Every transform's buffers count: a row that draws with top-p needs the most.
    sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=50)
    first_block = np.cumsum([1, *blocks])
    new_rows = [
        NewRow(
            handle=i,
            choice=0,
            token_ids=np.zeros(length, dtype=np.int64),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            sampling=sampling,
            grammar_ref=0,
            block_ids=np.arange(first_block[i], first_block[i + 1]),
            prompt_logprobs_done=True,
        )
        for i, length in enumerate(lengths)
    ]
    return Step(
        step=0,
        ended=[],
        copy_src_block_ids=_NO_IDS,
        copy_dst_block_ids=_NO_IDS,
        new_rows=new_rows,
        handles=list(range(len(lengths))),
        num_tokens=np.array(lengths, dtype=np.int64),
        num_new_blocks=np.zeros(len(lengths), dtype=np.int64),
        new_block_ids=_NO_IDS,
    )
