"""How fast the waiting queue drains: what ETAs and Retry-After are computed from."""

from __future__ import annotations

from math import exp

_MEMORY_S = 20.0
_MIN_SPAN_S = 1.0
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class DrainRate:
    """Admissions a second, over the last twenty seconds or so (exponentially forgotten)."""

    def __init__(self) -> None:
        self._count = 0.0
        self._start_s: float | None = None
        self._last_s = 0.0

    def note_admission(self, *, now: float) -> None:
        """A request has left the queue for the device."""
        if self._start_s is None:
            self._start_s = self._last_s = now
        self._count = self._count * exp((self._last_s - now) / _MEMORY_S) + 1.0
        self._last_s = now

    def per_second(self, *, now: float) -> float:
        """The rate; 0 before the first admission."""
        if self._start_s is None:
            return 0.0
        span_s = max(_MIN_SPAN_S, now - self._start_s)
        # The memory of a young queue holds less than _MEMORY_S of time.
        return (
            self._count
            * exp((self._last_s - now) / _MEMORY_S)
            / (_MEMORY_S * (1.0 - exp(-span_s / _MEMORY_S)))
        )

    def eta_s(self, num_ahead: int, *, now: float) -> float | None:
        """When ``num_ahead`` more admissions will have happened; None if nothing drains."""
        rate = self.per_second(now=now)
        return num_ahead / rate if rate > 0.0 else None

    def retry_after_s(self, num_waiting: int, *, now: float) -> float:
        """When the queue as it stands will have drained, kept to what a client can be asked."""
        eta_s = self.eta_s(num_waiting, now=now)
        if eta_s is None:
            return MAX_RETRY_AFTER_S if self._start_s is not None else MIN_RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, eta_s))
