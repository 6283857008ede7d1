"""Serves long-lived streams: a task reads, the RPC's handler writes, either may end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import grpc

from services.common.errors import InvariantError, SluicewayError, Unavailable
from services.common.telemetry import get_logger

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
Received = TypeVar("Received")
Written = TypeVar("Written")

log = get_logger(__name__)


class ServedStream(Protocol[In_contra, Out_co]):
    """What a stream means; it never waits for the network."""

    def on_frame(self, frame: In_contra) -> None:
        """Take one frame of the peer.

        Raises:
            SluicewayError: The stream must end with it.
        """

    def frames(self) -> AsyncGenerator[Out_co, None]:
        """What is written to the peer, until the stream has ended."""
        ...

    def end(self, error: SluicewayError | None) -> None:
        """The peer has ended the stream (``None``), or it must end. Idempotent."""

    def judge(self, now: float) -> None:
        """End the stream if its peer is dead or too far behind."""


class StreamHost:
    """All streams that are being served."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        """
        Args:
            tasks: The readers run in it.
        """
        self._tasks = tasks
        self._readers: dict[ServedStream[Any, Any], asyncio.Task[None]] = {}

    async def serve(
        self, stream: ServedStream[Received, Written], incoming: AsyncIterator[Received]
    ) -> AsyncGenerator[Written, None]:
        """Run a stream inside its RPC handler.

        Args:
            stream: What it means.
            incoming: The peer's frames.

        Yields:
            Frames to write.

        Raises:
            SluicewayError: Why the stream ended, if not well.
        """
        reader = self._readers[stream] = self._tasks.create_task(_read(stream, incoming))
        try:
            async with aclosing(stream.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            del self._readers[stream]
            stream.end(Unavailable("the connection was lost"))
            reader.cancel()

    def judge(self, now: float) -> None:
        """End the streams whose peers are dead or too far behind."""
        for stream in list(self._readers):
            stream.judge(now)

    def end_all(self, error: SluicewayError) -> None:
        """End every stream."""
        for stream, reader in list(self._readers.items()):
            stream.end(error)
            reader.cancel()


async def _read(stream: ServedStream[Received, Written], incoming: AsyncIterator[Received]) -> None:
    """The one boundary where a stream's failure is reported: it costs that stream only."""
    error: SluicewayError | None = None
    try:
        async for frame in incoming:
            stream.on_frame(frame)
    except SluicewayError as broken:
        error = broken
    except grpc.aio.AioRpcError as broken:
        error = Unavailable(f"the connection was lost: {broken.details()}")
    except Exception as bug:
        log.error("stream_failed", stream=type(stream).__name__, exc_info=bug)
        error = InvariantError("internal error; the scheduler's log has it")
    finally:
        stream.end(error)
