"""What one engine can do and is allowed to do; fixed for its life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of the worker and settings of the scheduler.

    Attributes:
        num_blocks: Blocks of the worker's cache, the null block 0 included.
        block_size: Tokens a block.
        max_model_len: Tokens (prompt and output) of one request.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Token budget of a step; at least ``max_num_seqs``.
        eos_token_ids: Tokens that end an output unless ``ignore_eos``.
        vocab_size: Token ids are below it.
        pipeline_depth: Steps in flight.
        enable_prefix_caching: Whether full blocks are found again by their keys.
        max_waiting: Requests that may wait before new ones are refused.
        policy: Order of the queue; priority equals fcfs while all priorities are 0.
        priority_aging_s: One level of priority is worth this many seconds of waiting: nobody
            starves.
        long_prefill_token_threshold: Most tokens of one prompt in a step; 0 = no limit.
        step_time_target_s: Prompts are cut so that steps with decoding rows last about this long;
            0 = off.
        prepare_timeout_s: How long a request may wait for its grammar.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    pipeline_depth: int = 2
    enable_prefix_caching: bool = True
    max_waiting: int = 1024
    policy: Literal["fcfs", "priority"] = "priority"
    priority_aging_s: float = 60.0
    long_prefill_token_threshold: int = 0
    step_time_target_s: float = 0.0
    prepare_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "vocab_size",
            "pipeline_depth",
            "max_waiting",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {self.num_blocks}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request takes a token a step"
            )

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1
