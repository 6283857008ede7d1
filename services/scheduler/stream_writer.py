"""The writing half of a long-lived server-side stream.

Whoever has something to say puts it into an outbox and calls ``wake``: nobody but this writer ever
waits for the network. From the first frame on a heartbeat goes out every ``HEARTBEAT_S``, whatever
else is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from services.common.errors import SluicewayError
from services.scheduler.liveness import HEARTBEAT_S

KILL_GRACE_S = 0.5
F = TypeVar("F")


class StreamWriter(Generic[F]):
    """Yields the frames of an outbox until it is closed.

    Iterate ``frames`` in the RPC's handler; call ``wake`` after filling the outbox and ``close`` to
    end.
    """

    def __init__(
        self,
        take: Callable[[float], F | None],
        *,
        heartbeat: Callable[[], F],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """
        Args:
            take: Gives the next frame to write at a monotonic time, or ``None``.
            heartbeat: Makes a heartbeat.
            heartbeat_s: Time between two heartbeats.
        """
        self._take = take
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._wake = asyncio.Event()
        self._beat: asyncio.TimerHandle | None = None
        self._is_beat_due = False
        self._is_writing = False
        self._is_closed = False
        self._error: SluicewayError | None = None
        self._handler: asyncio.Task[object] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def wake(self) -> None:
        """There may be something to write."""
        self._wake.set()

    def close(self, error: SluicewayError | None = None) -> None:
        """End the stream once the outbox is empty; the first call decides how.

        A write that the peer's full window still holds after a grace is cut off: a peer that does
        not read cannot be told anything.

        Args:
            error: The status of the stream; ``None`` = it ends well.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._error = error
        self._wake.set()
        asyncio.get_running_loop().call_later(KILL_GRACE_S, self._cut_off)

    async def frames(self) -> AsyncGenerator[F, None]:
        """Frames to write, in order.

        Raises:
            SluicewayError: What ``close`` was given.
        """
        self._handler = asyncio.current_task()
        try:
            while True:
                self._wake.clear()
                while (frame := self._next()) is not None:
                    self._is_writing = True
                    yield frame
                    self._is_writing = False
                if self._is_closed:
                    break
                await self._wake.wait()
        finally:
            self._is_writing = False
            if self._beat is not None:
                self._beat.cancel()
        if self._error is not None:
            raise self._error

    def _next(self) -> F | None:
        if self._is_beat_due and not self._is_closed:
            self._is_beat_due = False
            self._arm_beat()
            return self._heartbeat()
        frame = self._take(time.monotonic())
        if frame is not None and self._beat is None:
            self._arm_beat()
        return frame

    def _arm_beat(self) -> None:
        loop = asyncio.get_running_loop()
        self._beat = loop.call_later(self._heartbeat_s, self._beat_is_due)

    def _beat_is_due(self) -> None:
        self._is_beat_due = True
        self._wake.set()

    def _cut_off(self) -> None:
        if self._is_writing and self._handler is not None:
            self._handler.cancel()
