"""OpenAI's messages in the shape that templates expect, and a refusal of what is no chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.tokenizer.messages import parse_messages, parse_template_kwargs, parse_tools


def parsed(*messages: Any, keep_parts: bool = False) -> list[dict[str, Any]]:
    return parse_messages(json.dumps(messages), keep_parts=keep_parts)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {"role": "user"},
        ["Hi"],
        [{"content": "Hi"}],
        [{"role": "foo", "content": "Hi"}],
        [{"role": 1, "content": "Hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": None, "tool_calls": "no"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
            }
        ],
    ],
)
def test_what_is_no_chat_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_messages(json.dumps(messages), keep_parts=False)
    assert raised.value.param == "messages"


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        parse_messages("[" * 100_000, keep_parts=False)


def test_missing_content_is_empty_text_and_other_nulls_are_left_out() -> None:
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": None}
    assert parsed(message) == [{"role": "assistant", "content": ""}]


def test_parts_are_joined_unless_the_template_takes_them() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert parsed({"role": "user", "content": content})[0]["content"] == "a\nb"
    parts = parsed({"role": "user", "content": content}, keep_parts=True)[0]["content"]
    assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("arguments", "seen"), [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ({"a": 1}, {"a": 1})]
)
def test_tool_call_arguments_become_an_object(arguments: Any, seen: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = parsed({"role": "assistant", "tool_calls": [call]})[0]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": seen}


def test_reasoning_is_given_under_every_name_that_templates_read() -> None:
    message = parsed({"role": "assistant", "content": "a", "reasoning": "r"})[0]
    assert message["reasoning_content"] == message["thinking"] == "r"


def test_no_tools_and_an_empty_list_are_the_same() -> None:
    assert parse_tools("") is None
    assert parse_tools("[]") is None
    with pytest.raises(InvalidRequest):
        parse_tools('["f"]')


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "tokenize"])
def test_template_kwargs_cannot_replace_what_is_not_theirs(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        parse_template_kwargs(json.dumps({name: "x"}))
