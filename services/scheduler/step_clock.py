"""When the next step must be sent, and when a step counts as stalled.

Step n+1 is sent when the predicted rest of what is in flight falls below a lead: not earlier,
because the later a step is planned the fresher it is, and not later, because then the worker waits.
The core predicts each step; this clock learns how far the predictions are off. Knows no asyncio;
time is an argument.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MIN_LEAD_S = 0.003
LEAD_FACTOR = 3.0
STALL_AFTER_S = 10.0
STALL_FACTOR = 20.0
_SMOOTHING = 0.1
_WINDOW = 256
_REFRESH = 32


class Percentile:
    """The p99 of the last 256 samples, computed again every 32."""

    __slots__ = ("_samples", "_since", "value")

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0
        self.value = 0.0

    def add(self, sample: float) -> None:
        """Count one sample; until there are 32 the largest one is taken."""
        self._samples.append(sample)
        self._since += 1
        if self._since >= _REFRESH:
            self._since = 0
            ordered = sorted(self._samples)
            self.value = ordered[(len(ordered) * 99 - 1) // 100]
        elif len(self._samples) < _REFRESH:
            self.value = max(self.value, sample)


class _Sent(NamedTuple):
    predicted_s: float
    sent_at: float
    found_idle: bool


class StepClock:
    """The steps in flight of one engine.

    Call ``sent`` for every step in order and ``finished`` for every result in order.
    """

    def __init__(self) -> None:
        self._in_flight: deque[_Sent] = deque()
        self._began_at = 0.0
        self._ratio = 1.0
        self._deviation = 0.25
        self._planning = Percentile()
        self._wire = Percentile()

    @property
    def num_in_flight(self) -> int:
        """Steps sent whose result has not come."""
        return len(self._in_flight)

    @property
    def lead_s(self) -> float:
        """How long before the predicted end of the last step the next one must be sent."""
        return max(MIN_LEAD_S, LEAD_FACTOR * (self._planning.value + self._wire.value))

    def planned(self, seconds: float) -> None:
        """Planning and serialising one step took this long."""
        self._planning.add(seconds)

    def sent(self, predicted_s: float, *, now: float) -> None:
        """A step was handed to the wire; 0 = nothing is known of how long it will take."""
        found_idle = not self._in_flight
        if found_idle:
            self._began_at = now
        self._in_flight.append(_Sent(predicted_s, now, found_idle))

    def finished(self, device_s: float, *, now: float) -> float:
        """The result of the oldest step in flight has come.

        Args:
            device_s: The worker's own measure of it, in seconds.
            now: Monotonic seconds.

        Returns:
            Seconds that the step took as seen from here.
        """
        step = self._in_flight.popleft()
        took_s = now - self._began_at
        if step.found_idle:
            self._wire.add(max(took_s - device_s, 0.0))
        if step.predicted_s > 0.0:
            ratio = min(took_s / step.predicted_s, 4.0)
            self._deviation += _SMOOTHING * (abs(ratio - self._ratio) - self._deviation)
            self._ratio += _SMOOTHING * (ratio - self._ratio)
        self._began_at = now
        return took_s

    def send_at(self) -> float:
        """Monotonic time at which the next step should be sent; may lie in the past.

        Steps count as shorter than predicted by how much predictions are off: a step sent too early
        costs a little freshness, one sent too late leaves the worker idle.
        """
        share = max(self._ratio - self._deviation, 0.0)
        rest = share * sum(step.predicted_s for step in self._in_flight)
        return self._began_at + rest - self.lead_s

    def stalls_at(self) -> float | None:
        """When the oldest step in flight counts as stalled; ``None`` with none in flight."""
        if not self._in_flight:
            return None
        predicted = self._ratio * self._in_flight[0].predicted_s
        return self._began_at + max(STALL_AFTER_S, STALL_FACTOR * predicted)

    def age_s(self, now: float) -> float:
        """How long the oldest step in flight has been running, in seconds; 0 with none."""
        return now - self._began_at if self._in_flight else 0.0
