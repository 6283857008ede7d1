"""What the steps of an engine looked like; for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.output import StepPlan
from services.worker.executor import StepTimes


@dataclass(slots=True)
class Trace:
    """Counts and extremes since the start.

    Attributes:
        num_steps: Steps planned.
        most_rows: Rows of the widest step.
        most_tokens: Tokens of the largest.
        most_in_flight: Steps that were on their way at once.
        times: Of every step that ran, in order.
    """

    num_steps: int = 0
    most_rows: int = 0
    most_tokens: int = 0
    most_in_flight: int = 0
    times: list[StepTimes] = field(default_factory=list)

    def note(self, plan: StepPlan, *, num_in_flight: int) -> None:
        """Count a step that was sent."""
        self.num_steps += 1
        self.most_rows = max(self.most_rows, len(plan.handles))
        self.most_tokens = max(self.most_tokens, plan.total_num_tokens)
        self.most_in_flight = max(self.most_in_flight, num_in_flight)
