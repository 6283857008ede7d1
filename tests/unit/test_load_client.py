"""The benchmarks' client: what it sends, what it sees, and what it does not put up with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from aiohttp import web

from tests.benchmarks.compare import Side, table, turn_of
from tests.benchmarks.load import LoadClient, LoadError, words
from tests.benchmarks.workloads import MIN_CHUNKS_PER_TOKEN, WORKLOADS, measure, medians

Answer = Callable[[dict, web.StreamResponse], Awaitable[None]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """A server of /v1/completions; gives its URL."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await answer(await request.json(), response)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def event(response: web.StreamResponse, **fields: object) -> None:
    await response.write(b"data: " + json.dumps(fields).encode() + b"\n\n")


async def text(response: web.StreamResponse, piece: str) -> None:
    await event(response, choices=[{"text": piece}], usage=None)


async def end(response: web.StreamResponse, body: dict, *, num_tokens: int) -> None:
    usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": num_tokens}
    await event(response, choices=[], usage=usage)
    await response.write(b"data: [DONE]\n\n")


def answers(*, tokens_per_chunk: int) -> Answer:
    async def answer(body: dict, response: web.StreamResponse) -> None:
        await text(response, "")  # no first token
        for _ in range(0, body["max_tokens"], tokens_per_chunk):
            await text(response, " a" * tokens_per_chunk)
        await end(response, body, num_tokens=body["max_tokens"])

    return answer


async def test_a_stream_is_greedy_of_exact_length_and_counted_by_the_server() -> None:
    bodies = []

    async def answer(body: dict, response: web.StreamResponse) -> None:
        bodies.append(body)
        await answers(tokens_per_chunk=1)(body, response)

    async with server(answer) as url, LoadClient(url, model="m") as client:
        stream = await client.stream("three short words", 5)
    assert (stream.num_prompt_tokens, stream.num_tokens, stream.num_chunks) == (3, 5, 5)
    assert len(stream.gaps_s) == 4
    assert stream.tpot_s == pytest.approx(sum(stream.gaps_s) / 4)
    (body,) = bodies
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True
    assert body["model"] == "m"


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "mixed"])
async def test_several_tokens_in_a_chunk_fail_every_workload(name: str) -> None:
    async with server(answers(tokens_per_chunk=2)) as url, LoadClient(url, model="m") as client:
        with pytest.raises(AssertionError, match="chunks/token"):
            await measure(name, client, "seed")
    async with server(answers(tokens_per_chunk=1)) as url, LoadClient(url, model="m") as client:
        figures = await measure(name, client, "seed")
    assert figures[f"{name}.chunks_per_token"] >= MIN_CHUNKS_PER_TOKEN


async def test_a_stream_that_ends_in_an_error_fails() -> None:
    async def answer(body: dict, response: web.StreamResponse) -> None:
        await text(response, "a")
        await event(response, error={"message": "worker lost"})

    async with server(answer) as url, LoadClient(url, model="m") as client:
        with pytest.raises(LoadError, match="worker lost"):
            await client.stream("a", 5)


async def test_a_short_stream_fails() -> None:
    async def answer(body: dict, response: web.StreamResponse) -> None:
        await text(response, "a")
        await end(response, body, num_tokens=4)

    async with server(answer) as url, LoadClient(url, model="m") as client:
        with pytest.raises(LoadError, match="4 of 5 tokens"):
            await client.stream("a", 5)


async def test_a_stream_without_an_end_mark_fails() -> None:
    async def answer(body: dict, response: web.StreamResponse) -> None:
        await text(response, "a")

    async with server(answer) as url, LoadClient(url, model="m") as client:
        with pytest.raises(LoadError, match="DONE"):
            await client.stream("a", 1)


def test_prompts_of_different_seeds_differ_and_of_equal_seeds_are_equal() -> None:
    assert words(50, seed="1") == words(50, seed="1") != words(50, seed="2")
    assert len(words(50, seed="1").split()) == 50


def test_the_server_whose_turn_it_is_not_stands_still_with_its_children() -> None:
    child = "import time; print(flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            tree = [psutil.Process(process.pid)]
            tree += tree[0].children()
            assert len(tree) == 2
            side = Side("theirs", "", "", process.pid)
            with turn_of(Side("ours", "", "", None), side):
                assert [p.status() for p in tree] == ["stopped"] * 2
            assert "stopped" not in [p.status() for p in tree]
        finally:
            side.signal(signal.SIGKILL)


def test_medians_count_and_goals_are_judged() -> None:
    ours = medians([{"single.tpot_ms": v} for v in (5.0, 1.0, 6.0)])
    assert ours == {"single.tpot_ms": 5.0}
    assert table(ours, {"single.tpot_ms": 10.0})[1].endswith("0.500  <= 0.60 met")
    assert table(ours, {"single.tpot_ms": 8.0})[1].endswith("0.625  <= 0.60 MISSED")
