"""Feed: what many requests gain comes by one stream, and nothing is lost when it ends."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import grpc
import pytest

from services.common.errors import InvalidRequest, Unavailable
from services.common.pb import common_pb2, tokenizer_pb2
from services.common.rpc import translate
from tests.fakes.scheduler import Answer
from tests.unit.tokenizer.conftest import MODEL, MakeRig, Rig

WITHIN_S = 120
Deltas = list[tokenizer_pb2.TextDelta]


def request(number: int, *, feed: str = "f") -> tokenizer_pb2.GenerateRequest:
    return tokenizer_pb2.GenerateRequest(
        model=MODEL,
        key=common_pb2.RequestKey(request_id=f"r{number}"),
        text="x",
        feed_id=feed,
        feed_call=number,
    )


FeedCall = grpc.aio.UnaryStreamCall[tokenizer_pb2.FeedRequest, tokenizer_pb2.FeedFrame]


async def opened(rig: Rig, feed: str = "f") -> FeedCall:
    call: FeedCall = rig.stub.Feed(tokenizer_pb2.FeedRequest(feed_id=feed))
    first = await call.read()
    assert isinstance(first, tokenizer_pb2.FeedFrame)
    assert not first.call
    return call


async def read_until_ended(call: FeedCall, numbers: set[int]) -> tuple[dict[int, Deltas], int]:
    """The deltas of each request, and the frames in which they came."""
    deltas: dict[int, Deltas] = defaultdict(list)
    num_frames = 0
    running = set(numbers)
    async with asyncio.timeout(WITHIN_S):
        while running:
            frame = await call.read()
            assert isinstance(frame, tokenizer_pb2.FeedFrame)
            num_frames += 1
            for number, delta in zip(frame.call, frame.delta, strict=True):
                deltas[number].append(delta)
                if any(choice.HasField("finish") for choice in delta.choices):
                    running.remove(number)
    return deltas, num_frames


def num_ends(deltas: Deltas) -> int:
    return sum(choice.HasField("finish") for delta in deltas for choice in delta.choices)


def num_tokens(deltas: Deltas) -> int:
    return sum(len(choice.token_ids) for delta in deltas for choice in delta.choices)


async def test_what_follows_the_first_delta_comes_by_the_feed_and_the_call_ends_well(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: Answer([65] * 20), step_s=0.01) as rig:
        feed = await opened(rig)
        call = rig.stub.Generate(request(7))
        first = await call.read()
        assert isinstance(first, tokenizer_pb2.TextDelta)
        assert first.has_prompt
        deltas, _ = await read_until_ended(feed, {7})
        assert num_tokens([first, *deltas[7]]) == 20
        assert not any(delta.has_prompt for delta in deltas[7])
        assert await call.read() is grpc.aio.EOF


async def test_one_frame_has_the_news_of_all_requests(make_rig: MakeRig) -> None:
    numbers = set(range(16))
    async with make_rig(lambda add, index: Answer([65] * 20), step_s=0.05) as rig:
        feed = await opened(rig)
        calls = {number: rig.stub.Generate(request(number)) for number in numbers}
        firsts = {number: await call.read() for number, call in calls.items()}
        deltas, num_frames = await read_until_ended(feed, numbers)
        for number, first in firsts.items():
            assert isinstance(first, tokenizer_pb2.TextDelta)
            assert num_tokens([first, *deltas[number]]) == 20
        assert num_frames < sum(map(len, deltas.values())) / 4


async def test_an_answer_of_one_token_ends_once_by_the_call_or_by_the_feed(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        feed = await opened(rig)
        async with asyncio.timeout(WITHIN_S):
            deltas = [delta async for delta in rig.stub.Generate(request(1))]
            if not num_ends(deltas):
                deltas += (await read_until_ended(feed, {1}))[0][1]
        assert (num_tokens(deltas), num_ends(deltas)) == (1, 1)


async def test_a_stopping_service_opens_no_feed(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        rig.life.stopping.set()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await opened(rig)
        assert isinstance(translate(raised.value), Unavailable)


async def test_a_feed_that_is_not_open_is_refused_and_so_is_a_number_in_use(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: Answer([65], is_endless=True)) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.stub.Generate(request(1)).read()
        assert isinstance(translate(raised.value), Unavailable)
        await opened(rig)
        await rig.stub.Generate(request(1)).read()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.stub.Generate(request(1)).read()
        error = translate(raised.value)
        assert isinstance(error, InvalidRequest)
        assert error.param == "feed_call"


async def test_two_feeds_cannot_have_one_name(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        await opened(rig)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await opened(rig)
        assert isinstance(translate(raised.value), InvalidRequest)


async def test_a_client_that_closes_its_feed_gives_its_requests_up(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65], is_endless=True)) as rig:
        feed = await opened(rig)
        call = rig.stub.Generate(request(1))
        await call.read()
        feed.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async with asyncio.timeout(WITHIN_S):
                await call.read()
        assert isinstance(translate(raised.value), Unavailable)
        async with asyncio.timeout(WITHIN_S):
            while not rig.fake.aborts:
                await asyncio.sleep(0.01)


async def test_a_cancelled_request_leaves_the_feed_to_the_others(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65] * 40), step_s=0.01) as rig:
        feed = await opened(rig)
        given_up, kept = (rig.stub.Generate(request(number)) for number in (1, 2))
        await given_up.read()
        first = await kept.read()
        assert isinstance(first, tokenizer_pb2.TextDelta)
        given_up.cancel()
        deltas, _ = await read_until_ended(feed, {2})
        assert num_tokens([first, *deltas[2]]) == 40
        assert num_tokens(deltas[1]) < 40


async def test_a_stopping_service_ends_the_feed_once_its_requests_have_ended(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: Answer([65] * 30), step_s=0.02) as rig:
        feed = await opened(rig)
        first = await rig.stub.Generate(request(1)).read()
        assert isinstance(first, tokenizer_pb2.TextDelta)
        rig.life.stopping.set()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read_until_ended(feed, {1}))
            tasks.create_task(rig.service.run_out(timeout_s=WITHIN_S))
        deltas, _ = reading.result()
        assert num_tokens([first, *deltas[1]]) == 30
        assert await feed.read() is grpc.aio.EOF
