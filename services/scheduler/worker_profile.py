"""What a worker says of itself: at its Hello, while it loads, and once it is ready."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who attached: ``worker_id`` is a label for people, ``engine_id`` this one attachment."""

    engine_id: int
    worker_id: str
    model: str
    text_fp: str
    kv_fp: str
    address: str


@dataclass(frozen=True, slots=True)
class LoadingProgress:
    """Where loading stands: ``fraction`` (0..1) of the step named ``phase``."""

    phase: str
    fraction: float
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker discovered about itself once loaded.

    Attributes:
        num_blocks: Blocks of its cache, the null block 0 included.
        revision: Weights revision, the first field of a block key's root.
        pipeline_depth: Most steps that it takes at once; 0 = it does not mind.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pipeline_depth: int = 0
    features: tuple[str, ...] = ()
    revision: str = ""
    device: str = ""
    dtype: str = ""
