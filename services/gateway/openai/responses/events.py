"""Events of a streamed response: named, numbered from 0, in the order in which they come."""

from __future__ import annotations

from typing import Any, Protocol

from services.common.errors import SluicewayError
from services.gateway.sse import named_event


class Events(Protocol):
    """Takes what happens to a response."""

    def add(self, kind: str, **fields: Any) -> None:
        """Something has happened.

        Args:
            kind: The event's type.
            fields: The rest of its data, as it is now.
        """

    def take(self) -> bytes:
        """What was added since the last time, as server-sent events."""


class EventWriter:
    """Writes events down as they come."""

    def __init__(self) -> None:
        self._num_written = 0
        self._written: list[bytes] = []

    def add(self, kind: str, **fields: Any) -> None:
        """See ``Events``."""
        data = {"type": kind, "sequence_number": self._num_written, **fields}
        self._written.append(named_event(data))
        self._num_written += 1

    def take(self) -> bytes:
        """See ``Events``."""
        written, self._written = self._written, []
        return b"".join(written)


class NoEvents:
    """Nobody listens: the reply is sent whole."""

    def add(self, kind: str, **fields: Any) -> None:
        """See ``Events``."""

    def take(self) -> bytes:
        """See ``Events``."""
        return b""


def error_event(error: SluicewayError, *, number: int) -> bytes:
    """The event of an error that is not the response's but of those who tell of it.

    Args:
        error: It.
        number: The event's.
    """
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return named_event({"type": "error", "sequence_number": number, **fields})
