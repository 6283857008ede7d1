"""POST /v1/responses over five processes, asked by openai-python.

The model is a tiny random one: what it says makes sense only because it must.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import FunctionToolParam, Response
from pydantic import BaseModel

from tests.e2e.system import System
from tests.e2e.test_restarts import until_back

MODEL = "tiny"
LONG: dict[str, Any] = {"max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}
WITHIN_S = 60.0


class Trip(BaseModel):
    """A structured answer, of few forms."""

    city: Literal["Rome", "Oslo"]
    is_far: bool


BOOK: FunctionToolParam = {
    "type": "function",
    "name": "book",
    "description": "Books a trip.",
    "parameters": Trip.model_json_schema() | {"additionalProperties": False},
    "strict": True,
}


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    """A client without retries."""
    http = httpx.Client(trust_env=False, timeout=120)
    with openai.OpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0, http_client=http
    ) as made:
        yield made


def until_idle(system: System) -> None:
    """Wait until the engine runs nothing."""
    system.until(lambda: system.load().running == 0, timeout_s=WITHIN_S, what="an idle engine")


def test_a_stream_says_what_the_whole_response_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 24}
    asked |= {"temperature": 0, "top_logprobs": 2}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text != ""
    assert (last.response.status, last.response.usage) != (None, None)
    assert last.response.status == whole.status
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == whole.output_text
    assert logprobs_of(last.response) == logprobs_of(whole) != []


def logprobs_of(response: Response) -> list[tuple[str, int]]:
    """Each token of the answer, and how many alternatives it has."""
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    return [(one.token, len(one.top_logprobs)) for one in message.content[0].logprobs or []]


def test_structured_answers_are_parsed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Where?", "text_format": Trip}
    for seed in range(3):
        extra = {"seed": seed}
        parsed = client.responses.parse(**asked, temperature=2.0, extra_body=extra)
        with client.responses.stream(**asked, temperature=2.0, extra_body=extra) as stream:
            streamed = stream.get_final_response()
        assert isinstance(parsed.output_parsed, Trip)
        assert streamed.output_parsed == parsed.output_parsed


def test_a_loop_of_tools_goes_on_from_the_stored_response(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input="Book a trip.", tools=[BOOK], tool_choice="required"
    )
    (call,) = first.output
    assert call.type == "function_call" and call.name == "book"
    Trip.model_validate_json(call.arguments)
    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "booked"}],
        tools=[BOOK],
        tool_choice={"type": "function", "name": "book"},
    )
    (again,) = second.output
    assert again.type == "function_call" and again.call_id != call.call_id
    Trip.model_validate_json(again.arguments)


def test_a_conversation_goes_on_and_finds_its_beginning_in_the_cache(
    client: openai.OpenAI,
) -> None:
    story = "Once upon a time there was a scheduler. " * 8
    first = client.responses.create(
        model=MODEL, input=story, max_output_tokens=16, instructions="Be kind."
    )
    second = client.responses.create(
        model=MODEL,
        input="And then?",
        previous_response_id=first.id,
        max_output_tokens=4,
        instructions="Be kind.",
    )
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 16
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 2
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="x", previous_response_id=first.id)


def test_a_response_in_the_background_is_polled_and_cancelled(
    system: System, client: openai.OpenAI
) -> None:
    short = client.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=4)
    assert short.status == "queued"
    system.until(
        lambda: client.responses.retrieve(short.id).status == "incomplete",
        timeout_s=WITHIN_S,
        what="the response",
    )
    long = client.responses.create(model=MODEL, input="Hi", background=True, **LONG)
    system.until(lambda: system.load().running == 1, timeout_s=WITHIN_S, what="a request")
    assert client.responses.cancel(long.id).status == "cancelled"
    until_idle(system)
    assert client.responses.retrieve(long.id).status == "cancelled"


def test_a_client_that_leaves_frees_the_engine(system: System, client: openai.OpenAI) -> None:
    with client.responses.create(model=MODEL, input="Hi", stream=True, **LONG) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        assert system.load().running == 1
    began = time.monotonic()
    until_idle(system)
    assert time.monotonic() - began < 5


def test_a_lost_worker_is_a_failed_response(system: System, client: openai.OpenAI) -> None:
    last: Any = None
    try:
        for event in client.responses.create(model=MODEL, input="Hi", stream=True, **LONG):
            if event.type == "response.output_text.delta" and last is None:
                system.kill("worker")
            last = event
        if last.type == "response.failed":
            assert last.response.error.code == "server_error" and last.response.error.message
            kept = client.responses.retrieve(last.response.id)
            assert kept.status == "failed"
        else:
            assert last.type == "response.incomplete"  # it was resumed
    finally:
        until_back(system)


def test_bodies_that_are_wrong_name_their_fields(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"text": wanted}, "text.format"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "x" * 100_000}, "input"),
    ]
    for fields, param in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**({"model": MODEL, "input": "Hi"} | fields))
        assert caught.value.param == param, json.dumps(fields)[:80]
