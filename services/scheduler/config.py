"""Settings of the scheduler; what a worker discovers about itself travels as WorkerInfo instead."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.common.config import ServiceConfig


class SchedulerConfig(ServiceConfig):
    """What the scheduler can be told."""

    port: int = Field(
        50052, ge=0, le=65535, description="gRPC port to listen on; 0 = any free one."
    )
    http_port: int = Field(
        9102, ge=0, le=65535, description="Port of /metrics over HTTP; 0 = any free one."
    )
    advertise_address: str | None = Field(
        None,
        description="host:port at which tokenizers reach this scheduler; default: as it listens.",
    )
    kvstores: tuple[str, ...] = Field(
        (),
        description="Addresses of the kvstore's copies (host:port or dns:///name:port); "
        "empty = KV blocks are published nowhere.",
    )
    pipeline_depth: int = Field(
        2, ge=1, le=8, description="Most steps in flight per engine; a worker may ask for fewer."
    )
    enable_prefix_caching: bool = Field(
        True, description="Whether requests reuse the KV blocks of equal prefixes."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "priority",
        description="Order of waiting requests: by priority (lower first, then by arrival), or by "
        "arrival alone, so that requests with a priority are refused.",
    )
    max_waiting: int = Field(
        1024, ge=1, description="Most waiting requests per engine; more are refused with a 429."
    )
    step_time_target_ms: float = Field(
        200.0,
        ge=0,
        description="Most milliseconds that a step with decoding requests should last: prompts "
        "are cut so that they do not make the others stutter, to less where decoding alone is "
        "fast, but to no less than decoding takes beside them. Where more requests wait than "
        "decode it is more, up to 2.5 times as much. 0 = prompts take the whole token budget.",
    )
