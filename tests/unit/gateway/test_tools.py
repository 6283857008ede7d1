"""Tools in chat: what is enforced, what comes back, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.pb import common_pb2 as pb
from services.gateway.openai.chat import plan_chat
from services.gateway.openai.plan import Caller
from tests.fakes.tokenizer import Script
from tests.unit.gateway.desk import Desk, planning
from tests.unit.gateway.grammars import accepts

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_w",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
ODD = {
    "type": "function",
    "function": {
        "name": 'a"b\\é',
        "parameters": {
            "type": "object",
            "properties": {"t": {"$ref": "#/$defs/t"}},
            "required": ["t"],
            "$defs": {"t": {"enum": ["Zürich", "東京"]}},
        },
    },
}
ARGUMENTS = '{"city": "Rom", "days": 3}'
ONE_CALL = f'[{{"name": "get_w", "arguments": {ARGUMENTS}}}]'
TWO_CALLS = (
    f'[{{"name": "ping", "arguments": {{}}}}, {{"name": "get_w", "arguments": {ARGUMENTS}}}]'
)
NAMED = {"type": "function", "function": {"name": "get_w"}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    """A ``tool_choice`` of some of the tools."""
    names = [tool["function"]["name"] for tool in tools]
    references = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": references}}


def said(text: str, *, size: int = 3, **script: Any) -> Script:
    """A model that says this, a few characters per token."""
    tokens = [text[start : start + size] for start in range(0, len(text), size)]
    return Script(tokens=tokens, **script)


def allows(desk: Desk, text: str) -> bool:
    """Whether the constraint of the last request lets a text through to its end."""
    return accepts(desk.requests[-1], text)


def calls_of(reply: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call of a whole reply."""
    calls = reply["choices"][0]["message"].get("tool_calls", [])
    assert all(call["id"] and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def streamed_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    """The same out of a stream; id, type and name must come once, and first."""
    calls: list[list[str]] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        parts = choice["delta"].get("tool_calls", [])
        assert len({part["index"] for part in parts}) == len(parts)
        for part in parts:
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function"
                calls.append([part["function"]["name"], ""])
            else:
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
            calls[part["index"]][1] += part["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls]


def content_of(chunks: list[Any]) -> str:
    """All content of a stream."""
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


@pytest.mark.parametrize("strict", [None, False, True])
def test_required_is_enforced_with_and_without_strict(desk: Desk, strict: bool | None) -> None:
    function = WEATHER["function"] | {"strict": strict}
    desk.script = said(ONE_CALL)
    desk.chat(tools=[WEATHER | {"function": function}, PING], tool_choice="required")
    assert allows(desk, ONE_CALL)
    assert allows(desk, '[{"name": "ping", "arguments": {}}]')
    for wrong in (
        "Hi",
        "[]",
        TWO_CALLS,
        '[{"name": "pong", "arguments": {}}]',
        '[{"name": "ping", "arguments": {"x": 1}}]',
        '[{"name": "get_w", "arguments": {"city": "Rom"}}]',
        '[{"name": "get_w", "arguments": {"city": "Rom", "days": "3"}}]',
        '[{"name": "get_w", "arguments": {"city": "Rom", "days": 3, "x": 1}}]',
    ):
        assert not allows(desk, wrong), wrong


def test_several_calls_are_required_only_if_they_may_be_parallel(desk: Desk) -> None:
    for is_parallel in (True, False):
        desk.chat(tools=[WEATHER, PING], tool_choice="required", parallel_tool_calls=is_parallel)
        assert allows(desk, TWO_CALLS) is is_parallel
        assert allows(desk, ONE_CALL)


def test_a_named_function_is_enforced_as_its_arguments(desk: Desk) -> None:
    desk.script = said(ARGUMENTS)
    desk.chat(tools=[PING, WEATHER], tool_choice=NAMED)
    assert allows(desk, ARGUMENTS)
    assert not allows(desk, "{}")


def test_only_allowed_tools_can_be_required_and_the_prompt_shows_all(desk: Desk) -> None:
    desk.script = said(ONE_CALL)
    tools = [PING, WEATHER]
    reply = desk.chat(tools=tools, tool_choice=allowed("required", WEATHER))
    assert calls_of(reply) == [("get_w", ARGUMENTS)]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert allows(desk, ONE_CALL)
    assert not allows(desk, '[{"name": "ping", "arguments": {}}]')
    assert json.loads(desk.requests[-1].chat.tools_json) == tools


def test_the_schema_of_an_allowed_tool_is_named_by_its_place_among_all_tools(desk: Desk) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "array"}}}
    with pytest.raises(InvalidRequest) as caught:
        desk.chat(tools=[PING, WEATHER, bad], tool_choice=allowed("required", bad))
    assert caught.value.param == "tools[2].function.parameters"


def test_names_and_schemas_of_any_kind_can_be_enforced(desk: Desk) -> None:
    text = '[{"name": "a\\"b\\\\é", "arguments": {"t": "東京"}}]'
    desk.script = said(text)
    reply = desk.chat(tools=[ODD], tool_choice="required")
    assert allows(desk, text)
    assert not allows(desk, text.replace("東京", "Paris"))
    assert calls_of(reply) == [('a"b\\é', '{"t": "東京"}')]


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}]
)
def test_a_function_without_parameters_gets_an_empty_object(desk: Desk, parameters: Any) -> None:
    function = {"name": "ping", "parameters": parameters}
    desk.script = said("{}")
    choice = {"type": "function", "function": {"name": "ping"}}
    reply = desk.chat(tools=[{"type": "function", "function": function}], tool_choice=choice)
    assert allows(desk, "{}")
    assert not allows(desk, '{"x": 1}')
    assert calls_of(reply) == [("ping", "{}")]


def test_a_schema_that_says_what_else_it_holds_is_kept(desk: Desk) -> None:
    parameters = {"type": "object", "additionalProperties": {"type": "integer"}}
    function = {"name": "f", "parameters": parameters}
    choice = {"type": "function", "function": {"name": "f"}}
    desk.chat(tools=[{"type": "function", "function": function}], tool_choice=choice)
    assert allows(desk, '{"x": 1}')
    assert not allows(desk, '{"x": "1"}')


def test_what_cannot_be_enforced_is_told_of_the_tools(desk: Desk) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
    for choice, param in (("required", "tools"), ("none", "response_format")):
        plan = plan_chat(body | {"tool_choice": choice}, Caller(), desk.context, now=0)
        told = plan.in_client_words(InvalidRequest("it is too big", param="constraint"))
        assert told.param == param
        assert param in told.message


REPLIES = [
    pytest.param("required", ONE_CALL, [("get_w", ARGUMENTS)], "tool_calls", id="required"),
    pytest.param(
        "required", TWO_CALLS, [("ping", "{}"), ("get_w", ARGUMENTS)], "tool_calls", id="parallel"
    ),
    pytest.param(NAMED, ARGUMENTS, [("get_w", ARGUMENTS)], "stop", id="named"),
]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("choice", "text", "calls", "finish"), REPLIES)
def test_enforced_calls_come_back_the_same_streamed_and_whole(
    desk: Desk, choice: Any, text: str, calls: list[tuple[str, str]], finish: str, size: int
) -> None:
    desk.script = said(text, size=size, tokens_per_delta=2)
    fields = {"tools": [WEATHER, PING], "tool_choice": choice, "parallel_tool_calls": True}
    reply = desk.chat(**fields)
    assert calls_of(reply) == calls
    assert reply["choices"][0]["message"]["content"] is None
    assert reply["choices"][0]["finish_reason"] == finish
    *chunks, done = desk.chat_events(**fields)
    assert done == "[DONE]"
    assert streamed_calls(chunks) == calls
    assert content_of(chunks) == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == finish


def test_arguments_are_streamed_as_they_come(desk: Desk) -> None:
    desk.script = said(ONE_CALL, size=4)
    chunks = desk.chat_events(tools=[WEATHER], tool_choice="required")[:-1]
    parts = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert len(parts) > 5


def test_a_call_that_is_cut_ends_with_length_and_shows_what_there_is(desk: Desk) -> None:
    desk.script = said(ONE_CALL, size=1)
    fields = {"tools": [WEATHER], "tool_choice": "required"}
    for max_tokens in (5, len(ONE_CALL) - 8):
        reply = desk.chat(max_tokens=max_tokens, **fields)
        *chunks, _ = desk.chat_events(max_tokens=max_tokens, **fields)
        assert reply["choices"][0]["finish_reason"] == "length"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert calls_of(reply) == streamed_calls(chunks)
        assert not reply["choices"][0]["message"]["content"]
    assert calls_of(reply) == [("get_w", ARGUMENTS[:-6])]


def test_every_choice_makes_its_own_calls(desk: Desk) -> None:
    desk.script = said(ARGUMENTS)
    fields = {"tools": [WEATHER], "tool_choice": NAMED, "n": 2}
    first, second = desk.chat(**fields)["choices"]
    assert first["message"]["tool_calls"][0]["id"] != second["message"]["tool_calls"][0]["id"]


def test_log_probabilities_of_calls_are_complete_streamed_and_whole(desk: Desk) -> None:
    desk.script = said(ONE_CALL)
    fields = {"tools": [WEATHER], "tool_choice": "required", "logprobs": True}
    reply = desk.chat(**fields)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"]
    *chunks, _ = desk.chat_events(**fields)
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [WEATHER], "tool_choice": "none"},
    ],
)
def test_without_tools_to_call_it_is_a_plain_chat(desk: Desk, fields: dict[str, Any]) -> None:
    desk.script = said("Hello, world!")
    choice = desk.chat(**fields)["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello, world!",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"
    assert not desk.requests[0].HasField("constraint")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [PING]}, "tool_choice"),
        ({"tool_choice": "any", "tools": [PING]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [PING]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [PING]}, "tool_choice"),
        ({"tool_choice": allowed("required"), "tools": [PING]}, "tool_choice"),
        ({"tool_choice": allowed("none", PING), "tools": [PING]}, "tool_choice"),
        ({"tool_choice": allowed("auto", PING), "tools": [PING]}, "tool_choice"),
        ({"tool_choice": allowed("required", WEATHER), "tools": [PING]}, "tool_choice"),
        ({"tool_choice": allowed("required", PING)}, "tool_choice"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "x"}}, "tools": [PING]},
            "tool_choice",
        ),
        ({"tool_choice": [NAMED], "tools": [PING]}, "tool_choice"),
        ({"tool_choice": 5, "tools": [PING]}, "tool_choice"),
        ({"tools": [PING]}, "tools"),
        ({"tools": [PING], "tool_choice": "auto"}, "tool_choice"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(
    desk: Desk, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        desk.chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.fixture
def hermes(desk: Desk) -> Desk:
    """A model that writes calls as Hermes does."""
    desk.context = planning(tool_calls="hermes")
    return desk


CALL = f'<tool_call>\n{{"name": "get_w", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("before", ["", "Let me look."])
def test_a_model_that_is_free_to_call_may_call_and_talk(
    hermes: Desk, before: str, size: int
) -> None:
    hermes.script = said(f"{before}\n{CALL}", size=size)
    reply = hermes.chat(tools=[WEATHER])
    assert not hermes.requests[0].HasField("constraint")
    assert reply["choices"][0]["message"]["content"] == (before or None)
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert calls_of(reply) == [("get_w", ARGUMENTS)]
    *chunks, _ = hermes.chat_events(tools=[WEATHER], tool_choice="auto")
    assert streamed_calls(chunks) == calls_of(reply)
    assert content_of(chunks) == before
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_free_call_that_is_cut_leaves_the_whole_ones_and_ends_with_length(hermes: Desk) -> None:
    hermes.script = said(f"{CALL}\n{CALL}", size=1)
    for max_tokens in range(len(CALL), len(CALL) + CALL.index("}}") + 2):
        reply = hermes.chat(tools=[WEATHER], max_tokens=max_tokens)
        assert calls_of(reply) == [("get_w", ARGUMENTS)]
        assert reply["choices"][0]["message"]["content"] is None
        assert reply["choices"][0]["finish_reason"] == "length"
        *chunks, _ = hermes.chat_events(tools=[WEATHER], max_tokens=max_tokens)
        assert streamed_calls(chunks) == calls_of(reply)
        assert content_of(chunks) == ""
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_call_of_a_tool_that_is_not_allowed_is_text(hermes: Desk) -> None:
    hermes.script = said(CALL)
    fields: dict[str, Any] = {"tools": [WEATHER, PING]}
    assert calls_of(hermes.chat(**fields, tool_choice=allowed("auto", PING, WEATHER)))
    reply = hermes.chat(**fields, tool_choice=allowed("auto", PING))
    assert calls_of(reply) == []
    assert reply["choices"][0]["message"]["content"] == CALL
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_model_that_is_free_to_call_may_just_answer(hermes: Desk) -> None:
    hermes.script = said("It is <warm> \n")
    reply = hermes.chat(tools=[WEATHER])
    assert reply["choices"][0]["message"]["content"] == "It is <warm> \n"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert content_of(hermes.chat_events(tools=[WEATHER])[:-1]) == "It is <warm> \n"


def test_without_tools_nothing_is_read_as_a_call(hermes: Desk) -> None:
    hermes.script = said(CALL)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert hermes.chat(**fields)["choices"][0]["message"]["content"] == CALL


def test_only_one_call_is_told_if_they_may_not_be_parallel(hermes: Desk) -> None:
    hermes.script = said(CALL + CALL)
    assert len(calls_of(hermes.chat(tools=[WEATHER]))) == 2
    assert len(calls_of(hermes.chat(tools=[WEATHER], parallel_tool_calls=False))) == 1


@pytest.mark.parametrize(
    ("name", "shown"), [("hermes", False), ("mistral", True), ("llama3_json", True)]
)
def test_marks_that_are_special_tokens_stay_in_the_text_that_is_read(
    desk: Desk, name: str, shown: bool
) -> None:
    desk.context = planning(tool_calls=name)
    desk.chat(tools=[WEATHER])
    assert desk.requests[0].skip_special_tokens is not shown
    desk.chat()
    assert desk.requests[1].skip_special_tokens is True


FORM = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
CONSTRAINTS = [
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM}}),
    ("structured_outputs", {"json": FORM}),
]


@pytest.mark.parametrize(("field", "value"), CONSTRAINTS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_constrained_answer_or_fitting_calls_are_what_a_free_model_may_write(
    hermes: Desk, field: str, value: Any, is_parallel: bool
) -> None:
    fields = {"tools": [WEATHER, PING], field: value, "parallel_tool_calls": is_parallel}
    hermes.script = said(CALL)
    reply = hermes.chat(**fields)
    assert calls_of(reply) == [("get_w", ARGUMENTS)]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert allows(hermes, CALL)
    assert allows(hermes, '{"ok": true}')
    assert allows(hermes, f"{CALL}\n{CALL}") is is_parallel
    hermes.script = said(ARGUMENTS)
    assert calls_of(hermes.chat(**fields, tool_choice=NAMED)) == [("get_w", ARGUMENTS)]
    assert not allows(hermes, '{"ok": true}')


def test_neither_other_answers_nor_other_calls_pass_beside_a_constraint(hermes: Desk) -> None:
    ((field, value), _) = CONSTRAINTS
    hermes.chat(tools=[WEATHER, PING], **{field: value})
    for wrong in (
        "Hi",
        '{"ok": 1}',
        f'{{"ok": true}}{CALL}',
        CALL.replace("get_w", "get_x"),
        CALL.replace("3", '"3"'),
        f"So: {CALL}",
    ):
        assert not allows(hermes, wrong), wrong


@pytest.mark.parametrize(("field", "value"), CONSTRAINTS)
def test_a_constraint_is_refused_where_calls_have_no_grammar(
    desk: Desk, field: str, value: Any
) -> None:
    desk.context = planning(tool_calls="pythonic")
    with pytest.raises(InvalidRequest) as caught:
        desk.chat(tools=[WEATHER], **{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


def test_a_stop_text_inside_a_call_ends_it_there(desk: Desk) -> None:
    desk.script = said(ARGUMENTS[:9], stop="Rom", reason=pb.FINISH_REASON_STOP)
    reply = desk.chat(tools=[WEATHER], tool_choice=NAMED, stop="Rom")
    assert calls_of(reply) == [("get_w", ARGUMENTS[:9])]
    assert reply["choices"][0]["stop_reason"] == "Rom"
