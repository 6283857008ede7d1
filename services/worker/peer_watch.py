"""When a silent scheduler is dead.

Both ends of an Attach speak at least every half second; five seconds of silence are death. A
process whose own loop was late has not read what the peer did send, so it reads for one heartbeat
first.
"""

from __future__ import annotations

HEARTBEAT_S = 0.4
"""Time between two frames of ours; the protocol allows 0.5."""

DEAD_AFTER_S = 5.0
LATE_LOOP_S = 1.0
GRACE_S = 0.5


class PeerWatch:
    """Judges one peer. Time is an argument: monotonic seconds."""

    def __init__(self, *, period_s: float, now: float) -> None:
        """
        Args:
            period_s: Time between two calls of ``is_dead`` if the loop is on time.
            now: When the peer counts as heard first.
        """
        self._period_s = period_s
        self._heard_at = now
        self._judged_at = now
        self._judge_from = now

    def heard(self, now: float) -> None:
        """A frame has come."""
        self._heard_at = now

    def silent_s(self, now: float) -> float:
        """Seconds since the last frame."""
        return now - self._heard_at

    def is_dead(self, now: float) -> bool:
        """Whether the peer must be given up. Call it every ``period_s``."""
        if now - self._judged_at - self._period_s > LATE_LOOP_S:
            self._judge_from = now + GRACE_S
        self._judged_at = now
        return now >= self._judge_from and self.silent_s(now) > DEAD_AFTER_S
