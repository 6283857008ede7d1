"""How long an engine is remembered once nobody publishes for it. Pure: time is an argument."""

from __future__ import annotations


class Leases:
    """An engine lives while its publisher's stream does, and ``lease_s`` beyond it."""

    def __init__(self, *, lease_s: float) -> None:
        """
        Args:
            lease_s: Time that a publisher has to come back, in seconds.
        """
        self._lease_s = lease_s
        self._holder: dict[int, int] = {}
        self._ends_at: dict[int, float] = {}

    def hold(self, engine_id: int, *, stream: int) -> None:
        """A stream publishes for an engine; the newest stream holds it."""
        self._holder[engine_id] = stream
        self._ends_at.pop(engine_id, None)

    def end_stream(self, stream: int, *, now: float) -> None:
        """A stream has ended; the engines that no newer stream holds have ``lease_s`` left."""
        for engine_id, holder in list(self._holder.items()):
            if holder == stream:
                del self._holder[engine_id]
                self._ends_at[engine_id] = now + self._lease_s

    def forget(self, engine_id: int) -> None:
        """The engine has ended."""
        self._holder.pop(engine_id, None)
        self._ends_at.pop(engine_id, None)

    def held(self) -> list[int]:
        """Engines for which somebody publishes here."""
        return list(self._holder)

    def take_expired(self, *, now: float) -> list[int]:
        """Engines whose lease has ended; each is named once."""
        expired = [engine_id for engine_id, end in self._ends_at.items() if end <= now]
        for engine_id in expired:
            del self._ends_at[engine_id]
        return expired
