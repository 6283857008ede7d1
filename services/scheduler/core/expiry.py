"""When waiting requests run out of time."""

from __future__ import annotations

from heapq import heappop, heappush


class ExpiryHeap:
    """Times and handles, the earliest first. Entries of ended requests stay until they are due."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int]] = []

    def push(self, time_s: float, handle: int) -> None:
        """Remember to look at a request at ``time_s``."""
        heappush(self._entries, (time_s, handle))

    def next(self) -> float | None:
        """The earliest time, if any."""
        return self._entries[0][0] if self._entries else None

    def pop_due(self, now: float) -> list[int]:
        """Handles whose time has come, each entry once."""
        due = []
        while self._entries and self._entries[0][0] <= now:
            due.append(heappop(self._entries)[1])
        return due
