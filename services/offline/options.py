"""Settings of the engine in one process; names and defaults as the flags of ``sluiceway serve``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.scheduler.core.scheduler import EngineLimits
from services.worker.native.isa import IsaSetting
from services.worker.runner.build import RunnerFacts, RunnerOptions, resolve_device


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions:
    """What ``LLM`` can be told; see ``WorkerConfig`` and ``SchedulerConfig``.

    Attributes:
        step_time_target_ms: Off by default: in a script nobody waits for single tokens.
    """

    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    pipeline_depth: int = 2
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    step_time_target_ms: float = 0.0
    num_threads: int | None = None
    cpu_isa: IsaSetting = "auto"
    quantization: str | None = None

    def for_runner(self, model_dir: Path) -> RunnerOptions:
        """The worker's part.

        Raises:
            ConfigError: There is no such device.
        """
        return RunnerOptions(
            model_dir=model_dir,
            dtype=self.dtype,
            device=resolve_device(self.device),
            attention_backend=self.attention_backend,
            block_size=self.block_size,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            pipeline_depth=self.pipeline_depth,
            cpu_isa=self.cpu_isa,
            quantization=self.quantization,
            num_threads=self.num_threads,
        )

    def for_scheduler(self, facts: RunnerFacts) -> EngineLimits:
        """The scheduler's part, given what the runner discovered."""
        return EngineLimits(
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            eos_token_ids=facts.eos_token_ids,
            vocab_size=facts.vocab_size,
            pipeline_depth=self.pipeline_depth,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.scheduling_policy,
            step_time_target_s=self.step_time_target_ms / 1e3,
            max_waiting=sys.maxsize,
        )
