"""Anthropic's client against a real gateway: messages, streams, counts, keys and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageParam, ToolParam

from services.common.errors import Overloaded, RequestFailed, Unavailable, WorkerLost
from tests.fakes.tokenizer import MODEL, FakeTokenizer, Script
from tests.unit.gateway.desk import named_events
from tests.unit.gateway.http.conftest import Front, gateway

HI: list[MessageParam] = [{"role": "user", "content": "Hi"}]
WEATHER: ToolParam = {
    "name": "get_w",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '{"name": "get_w", "arguments": {"city": "Rom"}}'
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def client_of(front: Front, key: str = "none", **kwargs: Any) -> anthropic.AsyncAnthropic:
    """A client without retries."""
    return anthropic.AsyncAnthropic(
        base_url=front.url,
        api_key=key,
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        **kwargs,
    )


@contextmanager
def sync_client(front: Front) -> Iterator[anthropic.Anthropic]:
    """A client without retries."""
    http = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(
        base_url=front.url, api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


def texts(message: Message) -> list[str]:
    return [block.text for block in message.content if block.type == "text"]


async def test_a_message(front: Front) -> None:
    async with client_of(front) as client:
        message = await client.messages.create(model=MODEL, max_tokens=50, messages=HI)
    assert texts(message) == ["Hello, world!"]
    assert message.id.startswith("msg_")
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", MODEL)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (2, 4)


def talk(front: Front) -> list[str]:
    with sync_client(front) as client:
        with client.messages.stream(model=MODEL, max_tokens=50, messages=HI) as stream:
            said = "".join(stream.text_stream)
            whole = stream.get_final_message()
        return [said, *texts(whole)]


async def test_a_sync_stream(front: Front) -> None:
    assert await asyncio.to_thread(talk, front) == ["Hello, world!", "Hello, world!"]


async def test_what_the_client_makes_of_a_stream_is_the_whole_message() -> None:
    tokens = [*"<think>Hm.</think>\n\nSo: <tool_call>", *CALL, *"</tool_call>"]
    script = Script(tokens=tokens, cached_tokens=1)
    fields: Any = {"model": MODEL, "max_tokens": 200, "messages": HI, "tools": [WEATHER]}
    async with (
        FakeTokenizer(script).serving() as tokenizer,
        gateway(tokenizer, **PARSERS) as front,
        client_of(front) as client,
    ):
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            joined = await stream.get_final_message()
    assert [block.type for block in joined.content] == ["thinking", "text", "tool_use"]
    assert joined.stop_reason == whole.stop_reason == "tool_use"
    assert joined.usage == whole.usage
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (1, 1)
    drawn = {"id", "parsed_output"}
    assert [block.model_dump(exclude=drawn) for block in joined.content] == [
        block.model_dump(exclude=drawn) for block in whole.content
    ]


async def test_the_answer_of_a_call_goes_back_as_the_client_writes_it() -> None:
    script = Script(tokens=[*f"<tool_call>{CALL}</tool_call>"])
    async with (
        FakeTokenizer(script).serving() as tokenizer,
        gateway(tokenizer, **PARSERS) as front,
        client_of(front) as client,
    ):
        first = await client.messages.create(
            model=MODEL, max_tokens=200, messages=HI, tools=[WEATHER]
        )
        (call,) = first.content
        assert call.type == "tool_use" and call.input == {"city": "Rom"}
        tokenizer.script = Script(tokens=("Sun", "."))
        second = await client.messages.create(
            model=MODEL,
            max_tokens=50,
            tools=[WEATHER],
            messages=[
                *HI,
                {"role": "assistant", "content": first.content},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
                    ],
                },
            ],
        )
    assert texts(second) == ["Sun."]


async def test_events_are_named_and_in_order(front: Front) -> None:
    body = {"model": MODEL, "max_tokens": 2, "messages": HI, "stream": True}
    response = await front.http.post("/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.content, are_numbered=False)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 2
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


async def test_tokens_are_counted_and_nothing_is_generated(front: Front) -> None:
    async with client_of(front) as client:
        count = await client.messages.count_tokens(
            model=MODEL, system="Be brief.", messages=[{"role": "user", "content": "one two"}]
        )
        assert count.input_tokens == 6
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
            await client.messages.count_tokens(
                model=MODEL,
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
                        ],
                    }
                ],
            )
    assert not front.tokenizer.requests


@pytest.mark.parametrize(
    ("script", "error", "status", "kind"),
    [
        (Script(refusal=Overloaded("full")), anthropic.RateLimitError, 429, "rate_limit_error"),
        (
            Script(refusal=Unavailable("no worker")),
            anthropic.APIStatusError,
            503,
            "overloaded_error",
        ),
        (Script(failure=RequestFailed("NaN")), anthropic.InternalServerError, 500, "api_error"),
        (Script(breaks_after=1), anthropic.APIStatusError, 502, "api_error"),
    ],
)
async def test_errors_have_anthropics_envelope(
    front: Front, script: Script, error: type[anthropic.APIStatusError], status: int, kind: str
) -> None:
    front.tokenizer.script = script
    async with client_of(front) as client:
        with pytest.raises(error) as caught:
            await client.messages.create(model=MODEL, max_tokens=50, messages=HI)
    assert caught.value.status_code == status
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == kind
    assert body["error"]["message"]


async def test_an_error_in_a_stream_is_its_last_event(front: Front) -> None:
    front.tokenizer.script = Script(breaks_after=1, break_error=WorkerLost("gone"))
    body = {"model": MODEL, "max_tokens": 50, "messages": HI, "stream": True}
    response = await front.http.post("/v1/messages", json=body)
    events = named_events(response.content, are_numbered=False)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    async with client_of(front) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=50, messages=HI, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="gone"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("POST", "/v1/messages", [], 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"model": "other", "max_tokens": 5}, 400, "invalid_request_error"),
        (
            "POST",
            "/v1/messages",
            {"model": "other", "max_tokens": 5, "messages": HI},
            404,
            "not_found_error",
        ),
        ("POST", "/v1/messages", {"messages": ["x" * 3000]}, 413, "request_too_large"),
    ],
)
async def test_errors_before_the_route_have_anthropics_envelope_too(
    method: str, path: str, body: Any, status: int, kind: str
) -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, max_body_bytes=2048) as front,
    ):
        response = await front.http.request(method, path, json=body)
        other = await front.http.request("GET", "/v1/no/such/route")
    assert response.status_code == status, response.text
    told = response.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["error"]["message"]
    assert "type" not in other.json()  # the others keep OpenAI's


async def test_a_key_is_taken_as_anthropics_clients_send_it_and_as_openais_do() -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, api_key=("secret",)) as front,
    ):
        async with client_of(front, "secret") as client:
            message = await client.messages.create(model=MODEL, max_tokens=5, messages=HI)
            assert message.content
        async with client_of(front, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(model=MODEL, max_tokens=5, messages=HI)
        body: Any = caught.value.body
        assert body["error"]["type"] == "authentication_error"
        ask = {"model": MODEL, "max_tokens": 5, "messages": HI}
        statuses = {}
        for name, headers in {
            "alone": {"x-api-key": "secret"},
            "bearer": {"authorization": "Bearer secret"},
            "both": {"x-api-key": "secret", "authorization": "Bearer secret"},
            "wrong": {"x-api-key": "wrong"},
            "none": {},
        }.items():
            response = await front.http.post("/v1/messages", json=ask, headers=headers)
            statuses[name] = response.status_code
        chat = await front.http.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": HI},
            headers={"x-api-key": "secret"},
        )
    assert statuses == {"alone": 200, "bearer": 200, "both": 401, "wrong": 401, "none": 401}
    assert chat.status_code == 200


async def test_a_client_that_leaves_frees_its_request(front: Front) -> None:
    front.tokenizer.script = Script(gate=asyncio.Event())
    body = {"model": MODEL, "max_tokens": 50, "messages": HI, "stream": True}
    asking = asyncio.ensure_future(front.http.post("/v1/messages", json=body))
    await front.tokenizer.wait_for_requests(1)
    asking.cancel()
    await front.tokenizer.wait_idle()
    assert front.tokenizer.num_cancelled == 1
