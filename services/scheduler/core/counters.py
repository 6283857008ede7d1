"""Cumulative counts of one engine, from its start; what metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.output import FinishReason


@dataclass(slots=True)
class Counters:
    """Only ever grow. ``prefix_*`` count tokens: looked up by admitted requests, and found."""

    preemptions: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
