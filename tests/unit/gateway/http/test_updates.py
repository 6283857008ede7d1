"""What comes from a tokenizer: by a feed, without one, and with nothing to show."""

from __future__ import annotations

import asyncio

from tests.fakes.tokenizer import FakeTokenizer, Script
from tests.unit.gateway.http.conftest import Front, events, gateway

WITHIN_S = 600
LONG = Script(tokens=("a",) * 50, pace_s=0.01)


async def until_fed(tokenizer: FakeTokenizer) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not tokenizer.feeds:
            await asyncio.sleep(0.01)


async def test_a_tokenizer_without_feeds_is_served_by_the_calls() -> None:
    tokenizer = FakeTokenizer(LONG, has_feeds=False)
    async with tokenizer.serving(), gateway(tokenizer) as front:
        for _ in range(2):
            reply = await front.complete(stream=True, max_tokens=50)
            text = "".join(e["choices"][0]["text"] for e in events(reply)[:-1])
            assert text == "a" * 50
        assert not any(request.feed_id for request in tokenizer.requests)


async def test_requests_name_the_open_feed_each_by_its_own_number() -> None:
    tokenizer = FakeTokenizer(LONG)
    async with tokenizer.serving(), gateway(tokenizer) as front:
        await until_fed(tokenizer)
        replies = await asyncio.gather(
            *(front.complete(stream=True, max_tokens=50) for _ in range(5))
        )
        for reply in replies:
            text = "".join(e["choices"][0]["text"] for e in events(reply)[:-1])
            assert text == "a" * 50
        named = [(request.feed_id, request.feed_call) for request in tokenizer.requests]
        assert len(set(named)) == 5
        assert {feed for feed, _ in named} <= set(tokenizer.feeds)


async def test_a_call_that_ends_before_its_answer_does_ends_the_request_with_an_error() -> None:
    tokenizer = FakeTokenizer(Script(tokens=("a",) * 50, breaks_after=3))
    async with tokenizer.serving(), gateway(tokenizer) as front:
        await until_fed(tokenizer)
        async with asyncio.timeout(WITHIN_S):
            reply = await front.complete(stream=True, max_tokens=50)
        assert "error" in events(reply)[-1]
        assert (await front.complete()).status_code == 502


async def test_a_lost_tokenizer_ends_fed_requests_and_its_successor_serves() -> None:
    tokenizer = FakeTokenizer(Script(tokens=("a",) * 10_000, pace_s=0.01))
    async with tokenizer.serving(), gateway(tokenizer) as front:
        await until_fed(tokenizer)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(front.complete(stream=True, max_tokens=9999))
            await tokenizer.wait_for_deltas(5)
            await tokenizer.die()
        assert "error" in events(running.result())[-1]
        port = int(tokenizer.address.rpartition(":")[2])
        tokenizer.script = LONG
        async with tokenizer.serving(port=port):
            await front.until_health(200)
            reply = await front.complete(max_tokens=50)
            assert reply.json()["choices"][0]["text"] == "a" * 50


async def test_a_token_without_text_makes_a_chunk_too_so_that_the_stream_is_seen_to_go_on(
    front: Front,
) -> None:
    front.tokenizer.script = Script(tokens=("a", b"\xf0\x9f", b"\x8c\xb6", "b"))
    chunks = events(await front.complete(stream=True))[:-1]
    assert [e["choices"][0]["text"] for e in chunks] == ["a", "", "🌶", "b", ""]
    chunks = events(await front.chat(stream=True))[:-1]
    deltas = [e["choices"][0]["delta"] for e in chunks]
    assert deltas[1:] == [{"content": "a"}, {}, {"content": "🌶"}, {"content": "b"}, {}]
