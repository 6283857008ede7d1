"""How long steps take, and when one takes so long that the worker counts as stalled."""

from __future__ import annotations

import statistics
from collections import deque

from services.worker import metrics
from services.worker.executor import StepTimes

STALL_AFTER_S = 10.0
STALL_FACTOR = 20.0
"""A step older than the larger of ``STALL_AFTER_S`` and this many usual steps is stalled."""

_NUM_RECENT = 64


class StepClock:
    """Remembers the last steps. ``on_step`` may be called from another thread."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)

    def on_step(self, times: StepTimes) -> None:
        """A step has ended."""
        self._recent_s.append(times.total_s)
        metrics.STEPS.inc()
        metrics.FAILED_STEPS.inc(int(times.has_failed))
        metrics.TOKENS.inc(times.num_tokens)
        metrics.STEP_SECONDS.observe(times.total_s)
        metrics.DEVICE_SECONDS.observe(times.device_s)
        metrics.GAP_SECONDS.observe(times.gap_s)
        metrics.ROWS.set(times.num_rows)

    def is_stalled(self, step_age_s: float) -> bool:
        """Whether a step of this age is stalled."""
        recent = list(self._recent_s)
        usual_s = statistics.median(recent) if recent else 0.0
        return step_age_s > max(STALL_AFTER_S, STALL_FACTOR * usual_s)
