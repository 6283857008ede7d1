"""POST /v1/messages without HTTP: what a chat is asked for, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.pb import common_pb2 as pb
from services.gateway.anthropic.errors import error_json
from services.gateway.anthropic.plan import plan_message
from services.gateway.openai.plan import Caller
from tests.fakes.tokenizer import MODEL, Script
from tests.unit.gateway.desk import Body, Desk, planning
from tests.unit.gateway.grammars import accepts

WEATHER = {
    "name": "get_w",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '{"name": "get_w", "arguments": {"city": "Rom"}}'


def desk(script: Script | None = None, **parsers: str) -> Desk:
    found = Desk()
    found.script = script or Script()
    found.context = planning(**parsers)  # type: ignore[arg-type]
    return found


def said(text: str, *, size: int = 3, **script: Any) -> Script:
    """A model that says this, a few characters per token."""
    return Script(tokens=[text[i : i + size] for i in range(0, len(text), size)], **script)


def joined(events: list[Body]) -> Body:
    """The message that a stream puts together; fails if the events do not come in their order."""
    start, ping, *events, delta, stop = events
    assert (start["type"], ping, stop) == (
        "message_start",
        {"type": "ping"},
        {"type": "message_stop"},
    )
    message: Body = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    while events:
        opening, *events = events
        assert opening["type"] == "content_block_start"
        assert opening["index"] == len(message["content"])
        block, pieces = opening["content_block"], ""
        while events[0]["type"] == "content_block_delta":
            one, *events = events
            assert one["index"] == opening["index"]
            kinds = {"text": "text", "thinking": "thinking", "tool_use": "input_json"}
            assert one["delta"].pop("type") == f"{kinds[block['type']]}_delta"
            (piece,) = one["delta"].values()
            pieces += piece
        assert events.pop(0) == {"type": "content_block_stop", "index": opening["index"]}
        if block["type"] == "tool_use":
            block["input"] = json.loads(pieces or "{}")
        else:
            block[block["type"]] = pieces
        message["content"].append(block)
    assert delta["type"] == "message_delta"
    return message | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message: Body) -> Body:
    return message | {
        "id": "",
        "content": [block | {"id": ""} if "id" in block else block for block in message["content"]],
    }


SCRIPTS = {
    "text": Script(cached_tokens=1),
    "several tokens per delta": Script(tokens_per_delta=3),
    "bytes of characters": Script(tokens=(b"\xe6\x97", b"\xa5", "本")),
    "nothing": Script(tokens=()),
    "cut": Script(reason=pb.FINISH_REASON_LENGTH),
    "stopped by a text": Script(stop="END"),
    "a thought": said("<think>Hm.</think>\nYes."),
    "a thought that is cut": said("<think>Hm", reason=pb.FINISH_REASON_LENGTH),
    "a call after text": said(f"So: <tool_call>{CALL}</tool_call>"),
    "two calls": said(f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"),
    "thought, text, call": said(f"<think>Hm.</think>\n\nSo: <tool_call>{CALL}</tool_call>"),
}
FIELDS: dict[str, Body] = {
    "plain": {},
    "tools": {"tools": [WEATHER]},
    "thoughts left out": {"thinking": {"type": "adaptive", "display": "omitted"}},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_streamed_message_is_the_whole_one(script: Script, fields: Body) -> None:
    whole = desk(script, tool_calls="hermes", reasoning="qwen3").message(**fields)
    events = desk(script, tool_calls="hermes", reasoning="qwen3").message_events(**fields)
    assert without_ids(joined(events)) == without_ids(whole)


@pytest.mark.parametrize("choice", ["any", "tool"])
@pytest.mark.parametrize("is_parallel", [None, False, True])
def test_an_enforced_call_is_streamed_as_it_is_whole(choice: str, is_parallel: bool | None) -> None:
    text = '{"city": "Rom"}' if choice == "tool" else f"[{CALL}]"
    fields: Body = {"tools": [WEATHER], "tool_choice": {"type": choice}}
    if choice == "tool":
        fields["tool_choice"]["name"] = "get_w"
    if is_parallel is not None:
        fields["tool_choice"]["disable_parallel_tool_use"] = not is_parallel
    found = desk(said(text))
    whole = found.message(**fields)
    assert without_ids(joined(desk(said(text)).message_events(**fields))) == without_ids(whole)
    (block,) = whole["content"]
    assert block.pop("id").startswith("toolu_")
    assert block == {"type": "tool_use", "name": "get_w", "input": {"city": "Rom"}}
    assert whole["stop_reason"] == "tool_use"
    (request,) = found.requests
    assert accepts(request, text)
    if choice == "any":
        assert accepts(request, f"[{CALL}, {CALL}]") is bool(is_parallel)


def test_blocks_come_in_their_order_with_what_they_are() -> None:
    found = desk(SCRIPTS["thought, text, call"], tool_calls="hermes", reasoning="qwen3")
    message = found.message(tools=[WEATHER])
    thought, text, call = message["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "So:"}
    assert (call["type"], call["input"]) == ("tool_use", {"city": "Rom"})
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        (Script(), ("end_turn", None)),
        (Script(reason=pb.FINISH_REASON_LENGTH), ("max_tokens", None)),
        (Script(stop="END"), ("stop_sequence", "END")),
        (said(f"[{CALL}", reason=pb.FINISH_REASON_LENGTH), ("max_tokens", None)),
    ],
)
def test_why_it_ended_is_told(script: Script, ending: tuple[str, str | None]) -> None:
    message = desk(script).message(stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == ending


def test_cached_tokens_are_counted_apart() -> None:
    message = desk(Script(cached_tokens=2)).message(
        messages=[{"role": "user", "content": "one two three"}]
    )
    assert message["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_the_input_of_a_call_that_was_cut_short_is_empty() -> None:
    cut = said('[{"name": "get_w", "arguments": {"ci', reason=pb.FINISH_REASON_LENGTH)
    message = desk(cut).message(tools=[WEATHER], tool_choice={"type": "any"})
    (block,) = message["content"]
    assert (block["input"], message["stop_reason"]) == ({}, "max_tokens")


def chat_of(**fields: Any) -> list[Any]:
    """The messages of the chat that a tokenizer is asked to render."""
    found = desk(tool_calls="hermes", reasoning="qwen3")
    found.message(**fields)
    messages: list[Any] = json.loads(found.requests[0].chat.messages_json)
    return messages


def test_a_conversation_becomes_a_chat() -> None:
    assert chat_of(
        system=[{"type": "text", "text": "Be brief."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Rome.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "get_w", "input": {"city": "Rom"}},
                    {"type": "tool_use", "id": "t2", "name": "get_w", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "Sun."},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "?"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Rome.",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "get_w", "arguments": '{"city":"Rom"}'},
                },
                {"id": "t2", "type": "function", "function": {"name": "get_w", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Sun."},
        {"role": "tool", "tool_call_id": "t2", "content": "?"},
        {"role": "user", "content": "And now?"},
    ]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    part = {"type": "text", "text": "two"}
    assert chat_of(
        messages=[{"role": "user", "content": "one"}, {"role": "user", "content": [part]}]
    ) == [{"role": "user", "content": [{"type": "text", "text": "one"}, part]}]


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    found = desk()
    found.message(
        messages=[{"role": "user", "content": "Sun?"}, {"role": "assistant", "content": "It is ("}]
    )
    chat = found.requests[0].chat
    assert chat.continue_final_message and not chat.add_generation_prompt


def test_what_a_tokenizer_is_asked_for() -> None:
    found = desk(reasoning="qwen3")
    found.message(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["a", "b"],
        tools=[WEATHER],
        tool_choice={"type": "none"},
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={
            "effort": "low",
            "format": {"type": "json_schema", "schema": {"type": "integer"}},
        },
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
    )
    (request,) = found.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 5)
    assert list(request.stop) == ["a", "b"]
    assert json.loads(request.chat.template_kwargs_json) == {
        "enable_thinking": True,
        "reasoning_effort": "low",
    }
    (tool,) = json.loads(request.chat.tools_json)
    assert tool["function"]["parameters"] == WEATHER["input_schema"]
    assert request.HasField("constraint")


@pytest.mark.parametrize(("kind", "is_on"), [("enabled", True), ("disabled", False)])
def test_thinking_sets_the_variable_of_the_template(kind: str, is_on: bool) -> None:
    found = desk(reasoning="qwen3")
    found.message(thinking={"type": kind})
    kwargs = json.loads(found.requests[0].chat.template_kwargs_json)
    assert kwargs == {"enable_thinking": is_on}


def user(*blocks: Body) -> Body:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
CALLED = {"role": "assistant", "content": [USE]}
BAD_SCHEMA = {"name": "f", "input_schema": {"type": "no such type"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (user(), "messages[0].content"),
        (user({"type": "image", "source": {}}), "messages[0].content[0]"),
        (user(TEXT, {"type": "document", "source": {}}), "messages[0].content[1]"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "thinking", "thinking": "x"}), "messages[0].content[0]"),
        (
            user({"type": "tool_result", "tool_use_id": "t"}),
            "messages[0].content[0].tool_use_id",
        ),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0]",
        ),
        ({"messages": [CALLED]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"system": 7}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 200}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20260209", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [BAD_SCHEMA], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"logit_bias": {}, "suffix": "x"}, "suffix"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: Body, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        desk().message(**fields)
    assert caught.value.param == param
    told = error_json(caught.value)
    assert told["error"]["type"] == "invalid_request_error"
    assert param in told["error"]["message"]
    for theirs in ("max_completion_tokens", "response_format", "function.parameters"):
        assert theirs not in told["error"]["message"]


def test_what_a_worker_says_of_an_enforced_call_names_the_tools() -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    enforced = {"tools": [WEATHER], "tool_choice": {"type": "any"}}
    plan = plan_message(body | enforced, Caller(), planning(), now=0)
    assert plan.in_client_words(InvalidRequest("it is bad", param="constraint")).param == "tools"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_tokens", "max_tokens"),
        ("stop", "stop_sequences"),
        ("constraint", "output_config.format"),
        ("messages", "messages"),
    ],
)
def test_errors_from_down_the_line_name_the_field_as_here(theirs: str, ours: str) -> None:
    plan = plan_message(
        {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
        Caller(),
        planning(),
        now=0,
    )
    assert plan.in_client_words(InvalidRequest("no", param=theirs)).param == ours


def test_an_answer_that_does_not_fit_is_told_with_the_field_of_this_route() -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    plan = plan_message(body, Caller(), planning(), now=0)
    told = plan.in_client_words(InvalidRequest("lower max_tokens", param="max_tokens"))
    assert told.message == "lower max_tokens"
