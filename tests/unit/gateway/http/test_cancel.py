"""A client that goes frees what was started for it at once, in every phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.common.rpc import Endpoints
from services.gateway import tokenizer_client
from tests.fakes.tokenizer import MODEL, FakeTokenizer, Script
from tests.unit.gateway.http.conftest import Front, gateway

WITHIN_S = 600
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: BODY,
    "/v1/responses": {"model": MODEL, "input": "Hi"},
}


@pytest.mark.parametrize(("path", "n"), [(CHAT, 1), (CHAT, 4), ("/v1/responses", 1)])
async def test_closing_a_stream_cancels_its_generation(front: Front, path: str, n: int) -> None:
    front.tokenizer.script = Script(tokens=("a",) * 10_000, pace_s=0.01)
    body = BODIES[path] | {"stream": True, "n": n}
    async with front.http.stream("POST", path, json=body) as response:
        async for _ in response.aiter_bytes():
            break
    async with asyncio.timeout(WITHIN_S):
        await front.tokenizer.wait_idle()
    assert front.tokenizer.num_cancelled == 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_going_away_before_the_first_token_cancels(
    front: Front, stream: bool, path: str
) -> None:
    front.tokenizer.script = Script(gate=asyncio.Event())
    async with asyncio.TaskGroup() as group:
        body = BODIES[path] | {"stream": stream}
        request = group.create_task(front.http.post(path, json=body))
        await front.tokenizer.wait_for_requests(1)
        request.cancel()
    async with asyncio.timeout(WITHIN_S):
        await front.tokenizer.wait_idle()
    assert front.tokenizer.num_cancelled == 1


@pytest.mark.parametrize("path", BODIES)
async def test_going_away_from_a_whole_reply_cancels(front: Front, path: str) -> None:
    front.tokenizer.script = Script(tokens=("a",) * 10_000, pace_s=0.01)
    async with asyncio.TaskGroup() as group:
        request = group.create_task(front.http.post(path, json=BODIES[path]))
        await front.tokenizer.wait_for_deltas(5)
        request.cancel()
    async with asyncio.timeout(WITHIN_S):
        await front.tokenizer.wait_idle()
    assert front.tokenizer.num_cancelled == 1


async def test_going_away_cancels_every_prompt_of_a_batch(front: Front) -> None:
    front.tokenizer.script = Script(gate=asyncio.Event())
    async with asyncio.TaskGroup() as group:
        request = group.create_task(front.complete(["a", "b", "c"], stream=True))
        await front.tokenizer.wait_for_requests(3)
        request.cancel()
    async with asyncio.timeout(WITHIN_S):
        await front.tokenizer.wait_idle()
    assert front.tokenizer.num_cancelled == 3


async def test_reading_to_the_end_cancels_nothing(front: Front) -> None:
    for stream in (False, True):
        await asyncio.gather(*(front.chat(stream=stream) for _ in range(10)))
    await front.tokenizer.wait_idle()
    assert front.tokenizer.num_cancelled == 0


async def test_headers_are_sent_at_admission_and_not_before(front: Front) -> None:
    gate = asyncio.Event()
    front.tokenizer.script = Script(gate=gate)
    async with front.http.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
        assert response.status_code == 200  # though no token has come yet
        gate.set()
        text = "".join([piece async for piece in response.aiter_text()])
    assert text.endswith("data: [DONE]\n\n")


async def test_a_reader_that_does_not_read_does_not_hold_up_the_others() -> None:
    async with FakeTokenizer().serving() as tokenizer, gateway(tokenizer) as front:
        tokenizer.script = Script(tokens=("x" * 20_000,) * 2_000)
        async with front.http.stream("POST", CHAT, json=BODY | {"stream": True}) as stuck:
            assert stuck.status_code == 200
            tokenizer.script = Script()
            async with asyncio.timeout(WITHIN_S):
                response = await front.chat()
            assert response.status_code == 200
            assert tokenizer.num_running == 1  # held back, not lost


async def test_equal_client_ids_do_not_mix_requests(front: Front) -> None:
    gate = asyncio.Event()
    front.tokenizer.script = Script(gate=gate)
    headers = {"X-Request-Id": "same"}
    async with asyncio.TaskGroup() as group:
        both = [
            group.create_task(
                front.http.post(CHAT, json=BODY | {"request_id": "same"}, headers=headers)
            )
            for _ in range(2)
        ]
        await front.tokenizer.wait_for_requests(2)
        both[0].cancel()
        gate.set()
        response: httpx.Response = await both[1]
    assert response.json()["choices"][0]["message"]["content"] == "Hello, world!"
    assert response.headers["x-request-id"] == "same"
    first, second = front.tokenizer.requests
    assert first.key.request_id != second.key.request_id


@pytest.mark.parametrize("prompt", ["one", ["one", "two"]], ids=["one", "batch"])
async def test_a_stream_whose_tokenizer_leaves_the_list_under_it_ends_with_an_error(
    prompt: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_left = asyncio.Event()

    async def watch(endpoints: Endpoints) -> AsyncIterator[frozenset[str]]:
        yield await endpoints.resolve()
        await has_left.wait()
        yield frozenset()
        await asyncio.Event().wait()

    monkeypatch.setattr(Endpoints, "watch", watch)
    monkeypatch.setattr(tokenizer_client, "CLOSE_GRACE_S", 0.1)
    fake = FakeTokenizer(Script(tokens=("a",) * 10_000, pace_s=0.01), has_feeds=False)
    async with fake.serving() as tokenizer, gateway(tokenizer) as front:
        body = {"model": MODEL, "prompt": prompt, "stream": True}
        text = ""
        async with front.http.stream("POST", "/v1/completions", json=body) as response:
            async for piece in response.aiter_text():
                text += piece
                has_left.set()
        assert "worker_lost" in text
        assert "[DONE]" not in text
