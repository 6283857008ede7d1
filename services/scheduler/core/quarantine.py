"""Finds the one request that makes steps fail, by running the rows of a failed step again in
halves.

A request has passed once it has got a token again. Knows nothing of steps: the scheduler says who
was in the step that failed and who got a token, and runs only those that ``admits`` lets through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.scheduler.core.request import Request


class Quarantine:
    """Groups of suspects, tested one group at a time, the first first."""

    def __init__(self) -> None:
        self._groups: deque[list[Request]] = deque()

    @property
    def is_active(self) -> bool:
        """Whether somebody is still under suspicion."""
        return bool(self._groups)

    def admits(self, request: Request) -> bool:
        """Whether a request may run now."""
        return not self._groups or request in self._groups[0]

    def note_failed(self, rows: Sequence[Request]) -> Request | None:
        """A step has failed.

        Args:
            rows: The requests that were in it and have not ended since.

        Returns:
            The guilty one, if it was alone; it is no longer in quarantine.
        """
        for request in rows:
            self.discard(request)
        if len(rows) == 1:
            return rows[0]
        half = len(rows) // 2
        for group in (list(rows[half:]), list(rows[:half])):
            if group:
                self._groups.appendleft(group)
        return None

    def discard(self, request: Request) -> None:
        """A request has passed, or has ended. Others are ignored."""
        for group in self._groups:
            if request in group:
                group.remove(request)
        while self._groups and not self._groups[0]:
            self._groups.popleft()
