"""The writing half of a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing

import pytest

from services.common.errors import Unavailable
from services.scheduler import stream_writer
from services.scheduler.stream_writer import StreamWriter


class Outbox:
    def __init__(self) -> None:
        self.frames: deque[str] = deque()
        self.writer: StreamWriter[str] = StreamWriter(
            lambda now: self.frames.popleft() if self.frames else None,
            heartbeat=lambda: "beat",
            heartbeat_s=0.02,
        )

    def put(self, *frames: str) -> None:
        self.frames.extend(frames)
        self.writer.wake()


async def test_frames_come_in_order_and_the_stream_ends_once_they_are_out() -> None:
    outbox = Outbox()
    outbox.put("a", "b")
    outbox.writer.close()
    outbox.put("c")
    assert [frame async for frame in outbox.writer.frames()] == ["a", "b", "c"]


async def test_the_error_of_the_first_close_is_the_end_of_the_stream() -> None:
    outbox = Outbox()
    outbox.put("a")
    outbox.writer.close(Unavailable("first"))
    outbox.writer.close(Unavailable("second"))
    seen = []
    with pytest.raises(Unavailable, match="first"):
        async for frame in outbox.writer.frames():
            seen.append(frame)
    assert seen == ["a"]


async def test_heartbeats_come_whether_or_not_there_is_something_to_say() -> None:
    outbox = Outbox()
    outbox.put("word")
    seen: list[str] = []
    async with asyncio.timeout(60), aclosing(outbox.writer.frames()) as frames:
        async for frame in frames:
            seen.append(frame)
            if seen.count("beat") == 3:
                break
            if frame == "beat":
                outbox.put("word")
    assert seen == ["word", "beat", "word", "beat", "word", "beat"]


async def test_a_write_that_the_peer_never_takes_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_writer, "KILL_GRACE_S", 0.01)
    outbox = Outbox()
    is_stuck = asyncio.Event()

    async def handler() -> None:
        async for _ in outbox.writer.frames():
            is_stuck.set()
            await asyncio.Event().wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(handler())
        outbox.put("a")
        await is_stuck.wait()
        outbox.writer.close(Unavailable("the peer does not read"))
    assert task.cancelled()
