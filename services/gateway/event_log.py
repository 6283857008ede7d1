"""Events of a stream that goes on without its reader, for those who come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.types import Message

_END = b"\n\n"


class EventLog:
    """Takes events as an ASGI ``send`` does and gives them to any number of readers.

    A reader that is slow holds up nobody: what has come is kept.
    """

    def __init__(self, events: Sequence[bytes] = (), *, is_closed: bool = False) -> None:
        """
        Args:
            events: What has come already.
            is_closed: Whether that is all.
        """
        self._events = list(events)
        self._is_closed = is_closed
        self._changed = asyncio.Event()

    @property
    def events(self) -> tuple[bytes, ...]:
        """All that have come, one by one."""
        return tuple(self._events)

    async def send(self, message: Message) -> None:
        """ASGI; only the body counts."""
        self.append(message.get("body", b""))

    def append(self, events: bytes) -> None:
        """More whole events."""
        # JSON holds no line breaks, so that only ends of events look like one.
        self._events += [event + _END for event in events.split(_END) if event]
        self._notify()

    def close(self) -> None:
        """No more will come."""
        self._is_closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """Events from number ``start`` on, as they come, until no more will."""
        while True:
            changed = self._changed
            if start < len(self._events):
                new = self._events[start:]
                start += len(new)
                yield b"".join(new)
            elif self._is_closed:
                return
            else:
                await changed.wait()
