"""One Session without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.errors import Unavailable
from services.common.pb import common_pb2
from services.common.pb import scheduler_pb2 as pb
from services.common.rpc import PROTOCOL
from services.scheduler.convert import WallClock
from services.scheduler.session import Session
from tests.unit.scheduler.loopback import Loopback, settle

HELLO = pb.ClientFrame(hello=pb.SessionHello(protocol=PROTOCOL, session_id="s", text_fp="text-fp"))


@pytest.fixture
async def here() -> AsyncIterator[Loopback]:
    """A fleet with one engine whose steps are held."""
    async with asyncio.TaskGroup() as tasks:
        here = Loopback(tasks)
        here.attach(is_held=True)
        yield here
        here.check()
        here.close()


def opened(here: Loopback) -> Session:
    session = Session(
        here.fleet, wall=WallClock.now(), describe=lambda attachment: common_pb2.EngineState()
    )
    session.on_frame(HELLO)
    return session


def add(handle: int, request_id: str = "r") -> pb.ClientFrame:
    frame = pb.ClientFrame(
        add=pb.Add(
            key=common_pb2.RequestKey(request_id=request_id),
            prompt_ids=[1, 2],
            choices=[pb.AddChoice(handle=handle)],
        )
    )
    frame.add.sampling.max_tokens = 8
    return frame


async def test_a_session_that_ends_frees_what_its_handles_hold(here: Loopback) -> None:
    session = opened(here)
    session.on_frame(add(1))
    await settle()
    engine = here.fleet.attachments()[0].running_engine()
    assert engine.load().kv_blocks_used > 0
    session.end(Unavailable("the connection was lost"))
    assert (session.num_handles, here.fleet.num_tickets, here.fleet.num_sessions) == (0, 0, 0)
    assert engine.load().kv_blocks_used == 0


async def test_a_frame_that_comes_after_the_end_of_a_session_is_dropped(here: Loopback) -> None:
    session = opened(here)
    session.end(Unavailable("the client was silent"))
    session.on_frame(add(1))
    assert here.fleet.num_tickets == 0


async def test_an_add_that_cannot_be_read_ends_that_request_only(here: Loopback) -> None:
    session = opened(here)
    session.on_frame(add(1, "good"))
    bad = add(2, "bad")
    bad.add.constraint.spec = "of no kind"
    session.on_frame(bad)
    assert session.num_handles == 1
    session.end(None)
