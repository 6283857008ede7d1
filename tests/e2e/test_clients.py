"""Programs that people already have, against a running system that they know nothing of."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionMessageParam, ParsedChatCompletion
from pydantic import BaseModel, ConfigDict

from tests.e2e.system import System

MODEL = "tiny"
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
NAMED = {"type": "function", "function": {"name": "Mood"}}
TIMEOUT_S = 300.0
CLIENTS = Path(__file__).parent / "clients"


class Mood(BaseModel):
    """What an answer has to be; short, since a random model never comes to an end by itself."""

    model_config = ConfigDict(extra="forbid")

    word: Literal["größer", "東京"]
    is_sure: bool


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    """openai-python without retries."""
    with openai.OpenAI(
        base_url=f"{system.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=TIMEOUT_S,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        yield client


def async_client(system: System) -> openai.AsyncOpenAI:
    """The same, asynchronous."""
    return openai.AsyncOpenAI(
        base_url=f"{system.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=TIMEOUT_S,
        http_client=httpx.AsyncClient(trust_env=False),
    )


def test_openai_sync_talks_streams_and_lists_models(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(messages=HI, **fields)
    chunks = client.chat.completions.create(messages=HI, stream=True, **fields)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    assert whole.usage is not None and 1 <= whole.usage.completion_tokens <= 12
    text = client.completions.create(prompt="Hello", **fields)
    pieces = client.completions.create(prompt="Hello", stream=True, **fields)
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


async def test_openai_async_streams_many_at_once(system: System) -> None:
    async with async_client(system) as client:

        async def talk() -> ParsedChatCompletion[object]:
            state = ChatCompletionStreamState()
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=HI,
                temperature=0,
                max_tokens=8,
                n=2,
                logprobs=True,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                state.handle_chunk(chunk)
            return state.current_completion_snapshot

        replies = await asyncio.gather(*(talk() for _ in range(4)))
    texts = {choice.message.content for reply in replies for choice in reply.choices}
    assert len(texts) == 1
    for reply in replies:
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert [choice.message.role for choice in reply.choices] == ["assistant", "assistant"]
        entries = [len(c.logprobs.content or []) for c in reply.choices if c.logprobs]
        assert reply.usage is not None and sum(entries) == reply.usage.completion_tokens


def test_openai_parses_structured_output_streamed_and_whole(
    system: System, client: openai.OpenAI
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 250}
    fields["logit_bias"] = system.no_space()
    whole = client.chat.completions.parse(response_format=Mood, **fields)
    with client.chat.completions.stream(response_format=Mood, **fields) as stream:
        streamed = stream.get_final_completion()
    parsed = whole.choices[0].message.parsed
    assert isinstance(parsed, Mood)
    assert streamed.choices[0].message.parsed == parsed


@pytest.mark.parametrize("choice", ["required", "named"])
def test_openai_gets_tool_calls_from_a_model_that_knows_no_tools(
    system: System, client: openai.OpenAI, choice: str
) -> None:
    tool = openai.pydantic_function_tool(Mood)
    tool["function"]["strict"] = choice == "named"
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": HI,
        "temperature": 0,
        "logit_bias": system.no_space(),
        "max_tokens": 250,
        "tools": [tool],
        "tool_choice": NAMED if choice == "named" else choice,
    }
    whole = client.chat.completions.create(**fields)
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(stream=True, **fields):
        state.handle_chunk(chunk)
    (call,) = whole.choices[0].message.tool_calls or []
    (streamed,) = state.get_final_completion().choices[0].message.tool_calls or []
    assert call.type == streamed.type == "function"
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    Mood.model_validate_json(call.function.arguments)


def test_openai_gets_tool_calls_by_its_stream_helper(system: System, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=HI,
        tools=[openai.pydantic_function_tool(Mood)],
        tool_choice="required",
        max_tokens=250,
        temperature=0,
        logit_bias=system.no_space(),
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Mood)
    assert final.choices[0].finish_reason == "tool_calls"


def test_openai_raises_what_its_user_expects(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[1] * 5000)
    assert long.value.code == "context_length_exceeded"


def run_client(script: str, system: System, **environment: str) -> dict[str, Any]:
    """What a client of another library got; in a process of its own, with its own warnings."""
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    command += [sys.executable, str(CLIENTS / script), system.url, MODEL]
    command += [json.dumps(system.no_space())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_litellm_talks_streams_calls_tools_and_maps_errors(system: System) -> None:
    found = run_client("with_litellm.py", system, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert found["whole"] == found["streamed"] == found["streamed_async"]
    assert 1 <= found["completion_tokens"] <= 12
    assert found["call"][0] == "set_light"
    assert found["call"][1]["on"] in (True, False)
    assert found["finish_reason"] == "tool_calls"
    assert isinstance(found["text"], str)
    assert "temperature" in found["error"]


def test_langchain_talks_streams_calls_tools_and_parses(system: System) -> None:
    found = run_client("with_langchain.py", system)
    assert found["whole"] == found["streamed"]
    assert found["batch"] == [found["whole"]] * 2
    assert found["usage"] == found["streamed_usage"] > 0
    assert found["call"] == found["streamed_call"]
    name, arguments = found["call"]
    assert name == "set_light"
    assert arguments["room"] in ("kitchen", "hall") and arguments["on"] in (True, False)
    assert found["after_the_call"] in ("stop", "length")
    responses = found["responses"]
    assert responses["whole"] == responses["streamed"] == found["whole"]
    assert responses["call"] == found["call"]
    assert responses["after_the_call"] in ("completed", "incomplete")
    for mood in (found["structured"], found["by_a_tool"], responses["structured"]):
        assert mood["word"] in ("good", "bad") and mood["is_sure"] in (True, False)
