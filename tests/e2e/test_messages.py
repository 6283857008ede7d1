"""Anthropic's client, through the five processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.system import System

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FEATURES: dict[str, Any] = {
    "plain": {},
    "system": {"system": "Be brief.", "extra_body": {"temperature": 0.7, "seed": 5}},
    "stop": {"stop_sequences": [" ", "e"]},
    "one of the tools": {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 200},
    "a named tool": {
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 200,
    },
    "schema": {
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "max_tokens": 200,
    },
    "prefill": {"messages": [*QUESTION, {"role": "assistant", "content": "The answer is"}]},
}


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[anthropic.Anthropic]:
    http = anthropic.DefaultHttpxClient(trust_env=False, timeout=120)
    with anthropic.Anthropic(
        base_url=system.url, api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


@pytest.mark.parametrize("name", FEATURES)
def test_a_streamed_message_is_the_whole_one(client: anthropic.Anthropic, name: str) -> None:
    # The client's own types leave the sampling parameters out.
    plain = {"extra_body": {"temperature": 0}, "messages": QUESTION, "max_tokens": 24}
    fields: Any = {"model": "tiny", **plain, **FEATURES[name]}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        joined = stream.get_final_message()
    drawn = {"id", "parsed_output"}
    assert [block.model_dump(exclude=drawn) for block in joined.content] == [
        block.model_dump(exclude=drawn) for block in whole.content
    ]
    assert (joined.stop_reason, joined.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert joined.usage.output_tokens == whole.usage.output_tokens > 0
    if "tool_choice" in fields:
        (call,) = whole.content
        assert whole.stop_reason == "tool_use" and call.type == "tool_use"
        assert call.input["city"] in ("Paris", "Rome") and 1 <= int(str(call.input["days"])) <= 7
    if name == "stop":
        assert whole.stop_reason == "stop_sequence" and whole.stop_sequence in (" ", "e")


def test_counted_tokens_are_those_of_the_prompt_however_many_are_cached(
    client: anthropic.Anthropic,
) -> None:
    asked: Any = {"model": "tiny", "system": "Count with me. " * 20, "messages": QUESTION}
    count = client.messages.count_tokens(**asked).input_tokens
    usages = [client.messages.create(**asked, max_tokens=2).usage for _ in range(2)]
    for usage in usages:
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert usages[1].cache_read_input_tokens


def test_an_answer_that_does_not_fit_the_context_is_refused_by_name(
    client: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        client.messages.create(model="tiny", max_tokens=100_000, messages=QUESTION)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
