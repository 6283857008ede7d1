"""When a dead child is started again, and when it has died too often. Pure: no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """1, 2, 4 ... seconds before the next life; the sixth death in ten minutes is the last.

    Attributes:
        first_delay_s: Pause after the first death of a window; doubled with each further one.
        max_deaths: So many deaths within the window, and there is no next life.
        window_s: Older deaths are forgotten.
    """

    first_delay_s: float = 1.0
    max_deaths: int = 6
    window_s: float = 600.0


class Deaths:
    """The deaths of one child."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._times: list[float] = []

    def record(self, now: float) -> float | None:
        """Note a death.

        Args:
            now: Seconds of a monotonic clock.

        Returns:
            Seconds until the child is to be started again; ``None`` = never.
        """
        self._times = [t for t in self._times if now - t < self._policy.window_s]
        self._times.append(now)
        if len(self._times) >= self._policy.max_deaths:
            return None
        return float(self._policy.first_delay_s * 2 ** (len(self._times) - 1))

    @property
    def num_recent(self) -> int:
        """Deaths within the window that ended with the last one."""
        return len(self._times)
