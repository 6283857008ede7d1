"""When a silent peer is dead.

Both ends of a stream speak every ``HEARTBEAT_S``; a peer silent for ``DEAD_AFTER_S`` is dead. A
process whose own loop was late has not read what the peers did send, so it reads for one heartbeat
first.
"""

from __future__ import annotations

HEARTBEAT_S = 0.5
DEAD_AFTER_S = 5.0
LATE_LOOP_S = 1.0


class Judge:
    """Says whether peers may be judged now. Call ``may_judge`` at a steady period."""

    def __init__(self, *, period_s: float, now: float) -> None:
        """
        Args:
            period_s: Time between two calls of ``may_judge``, if the loop is on time.
            now: Monotonic seconds.
        """
        self._period_s = period_s
        self._last = now
        self._not_before = now

    def may_judge(self, now: float) -> bool:
        """Whether the loop has been on time long enough to hold silence against a peer."""
        if now - self._last - self._period_s > LATE_LOOP_S:
            self._not_before = now + HEARTBEAT_S
        self._last = now
        return now >= self._not_before


class Pulse:
    """When a peer was last heard."""

    __slots__ = ("_heard_at",)

    def __init__(self, *, now: float) -> None:
        self._heard_at = now

    def beat(self, now: float) -> None:
        """A frame has come."""
        self._heard_at = now

    def silent_s(self, now: float) -> float:
        """Seconds since the last frame."""
        return now - self._heard_at

    def is_dead(self, now: float) -> bool:
        """Whether the silence is too long."""
        return self.silent_s(now) > DEAD_AFTER_S
