"""openai-python's client.responses against a real gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall
from pydantic import BaseModel

from services.common.errors import RequestFailed
from tests.fakes.tokenizer import MODEL, FakeTokenizer, Script
from tests.unit.gateway.http.conftest import Front, gateway
from tests.unit.gateway.http.test_openai_python import async_client, sync_client

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def letters(text: str) -> Script:
    """A script that says a text letter by letter."""
    return Script(tokens=tuple(text))


async def test_a_text_in_and_a_text_out(front: Front) -> None:
    def ask() -> str:
        with sync_client(front) as client:
            return client.responses.create(model=MODEL, input="Hi").output_text

    assert await asyncio.to_thread(ask) == "Hello, world!"


async def test_the_events_of_a_stream_have_their_types(front: Front) -> None:
    async with async_client(front) as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Hello, world!"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == text


async def test_the_stream_helper_gives_the_final_response(front: Front) -> None:
    async with (
        async_client(front) as client,
        client.responses.stream(model=MODEL, input="Hi") as stream,
    ):
        final = await stream.get_final_response()
    assert final.output_text == "Hello, world!" and final.usage is not None


class City(BaseModel):
    """A structured answer."""

    name: str


async def test_structured_answers_are_parsed_whole_and_streamed(front: Front) -> None:
    front.tokenizer.script = letters('{"name": "Rome"}')
    async with async_client(front) as client:
        parsed = await client.responses.parse(model=MODEL, input="Hi", text_format=City)
        async with client.responses.stream(model=MODEL, input="Hi", text_format=City) as stream:
            streamed = await stream.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == City(name="Rome")
    schema = json.loads(front.tokenizer.requests[0].constraint.spec)
    assert schema["properties"]["name"]["type"] == "string"


async def test_a_loop_of_tools(front: Front) -> None:
    front.tokenizer.script = letters('[{"name": "get_weather", "arguments": {"city": "Rome"}}]')
    async with async_client(front) as client:
        first = await client.responses.create(
            model=MODEL, input="Weather in Rome?", tools=[WEATHER], tool_choice="required"
        )
        (call,) = first.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert json.loads(call.arguments) == {"city": "Rome"}
        front.tokenizer.script = Script()
        second = await client.responses.create(
            model=MODEL,
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        )
    assert second.output_text == "Hello, world!" and second.previous_response_id == first.id
    sent = json.loads(front.tokenizer.requests[-1].chat.messages_json)
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == call.call_id


async def test_calls_are_streamed_in_pieces_and_parsed(front: Front) -> None:
    front.tokenizer.script = letters('{"city": "Rome"}')
    choice: Any = {"type": "function", "name": "get_weather"}
    async with (
        async_client(front) as client,
        client.responses.stream(
            model=MODEL, input="Hi", tools=[WEATHER | {"strict": True}], tool_choice=choice
        ) as stream,
    ):
        pieces = [
            event.delta
            async for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        final = await stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    assert len(pieces) > 1 and "".join(pieces) == call.arguments
    assert call.parsed_arguments == {"city": "Rome"}


async def test_a_thought_comes_as_an_item_and_in_events() -> None:
    script = letters("<think>Hm.</think>Yes.")
    async with (
        FakeTokenizer(script).serving() as tokenizer,
        gateway(tokenizer, reasoning_parser="qwen3") as front,
        async_client(front) as client,
    ):
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        events = [event async for event in stream]
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "Hm."
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "Yes."
    assert [item.type for item in last.response.output] == ["reasoning", "message"]


async def test_a_response_is_retrieved_listed_continued_and_deleted(front: Front) -> None:
    async with async_client(front) as client:
        first = await client.responses.create(model=MODEL, input="one", metadata={"a": "b"})
        again = await client.responses.retrieve(first.id)
        assert again == first
        items = await client.responses.input_items.list(first.id)
        assert [item.type for item in items.data] == ["message"]
        second = await client.responses.create(
            model=MODEL, input="two", previous_response_id=first.id
        )
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        third = await client.responses.create(
            model=MODEL, input="three", previous_response_id=second.id
        )
    assert third.output_text == "Hello, world!"
    sent = json.loads(front.tokenizer.requests[-1].chat.messages_json)
    assert [message["content"] for message in sent][::2] == ["one", "two", "three"]


async def test_a_failure_in_mid_stream_is_a_failed_response_that_is_kept(front: Front) -> None:
    front.tokenizer.script = Script(failure=RequestFailed("NaN logits"))
    async with async_client(front) as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        assert last.response.error.message == "NaN logits"
        kept = await client.responses.retrieve(last.response.id)
        assert kept.status == "failed" and kept.error == last.response.error
        with pytest.raises(openai.BadRequestError, match="that response is failed"):
            await client.responses.create(model=MODEL, input="x", previous_response_id=kept.id)


async def test_errors_before_the_stream_are_raised_as_their_classes(front: Front) -> None:
    async with async_client(front) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model=MODEL, input="Hi", tools=[{"type": "web_search"}])
        assert bad.value.param == "tools[0]"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="nope", input="Hi", stream=True)
        assert missing.value.code == "model_not_found"
        front.tokenizer.script = Script(refusal=RequestFailed("NaN"))
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model=MODEL, input="Hi", stream=True)


async def test_one_key_does_not_find_what_another_has_stored() -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, api_key=("one", "two"), wait=True) as front,
        async_client(front, "one") as one,
        async_client(front, "two") as two,
    ):
        response = await one.responses.create(model=MODEL, input="Hi")
        assert (await one.responses.retrieve(response.id)).id == response.id
        for call in (two.responses.retrieve, two.responses.delete, two.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await call(response.id)


@pytest.mark.parametrize("background", [False, True])
async def test_a_conversation_that_is_too_long_loses_its_oldest_turns_if_it_may(
    front: Front, background: bool
) -> None:
    given: Any = [{"role": "user", "content": f"{number} word " * 8} for number in range(20)]
    async with async_client(front) as client:
        response = await client.responses.create(
            model=MODEL, input=given, truncation="auto", background=background
        )
        await front.tokenizer.wait_for_requests(1)
        sent = json.loads(front.tokenizer.requests[0].chat.messages_json)
        items = await client.responses.input_items.list(response.id, limit=100)
    assert response.truncation == "auto"
    assert 10 < len(sent) < 20  # each is 17 of the 256 tokens
    assert sent[-1]["content"].startswith("19 word")
    assert len(items.data) == 20
