"""POST /v1/responses: what goes in, and what the model is given of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from services.common.errors import InvalidRequest
from tests.fakes.tokenizer import Script
from tests.unit.gateway.desk import Desk, planning

WEATHER = {"type": "function", "name": "get_w", "description": "d", "parameters": {}}
CALL = {"type": "function_call", "call_id": "c1", "name": "get_w", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_w", "arguments": '{"a": 1}'},
}


def messages(desk: Desk, given: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages that the model is given."""
    desk.respond(given, **fields)
    found: list[dict[str, Any]] = orjson.loads(desk.requests[-1].chat.messages_json)
    return found


def refusal(desk: Desk, given: Any = "Hi", **fields: Any) -> InvalidRequest:
    """The error of a request."""
    with pytest.raises(InvalidRequest) as caught:
        desk.respond(given, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Hi", [{"role": "user", "content": "Hi"}]),
        ("", [{"role": "user", "content": ""}]),
        ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]),
        (
            [{"type": "message", "role": "developer", "content": "Be kind."}],
            [{"role": "developer", "content": "Be kind."}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            [{"role": "user", "content": "Hi"}],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_text", "text": "b"},
                    ],
                }
            ],
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        ),
    ],
)
def test_messages_are_given_on_in_every_form(
    desk: Desk, given: Any, expected: list[dict[str, Any]]
) -> None:
    assert messages(desk, given) == expected


def test_instructions_are_a_system_message_in_front(desk: Desk) -> None:
    found = messages(desk, "Hi", instructions="Be kind.")
    assert [message["role"] for message in found] == ["system", "user"]
    assert found[0]["content"] == "Be kind."


def test_thought_text_and_calls_of_one_turn_are_one_message(desk: Desk) -> None:
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    answer = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    }
    second = CALL | {"call_id": "c2"}
    found = messages(
        desk,
        [
            {"role": "user", "content": "Weather?"},
            *(thought, answer, CALL, second),
            *(
                OUTPUT,
                OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
            ),
            {"role": "assistant", "content": "It rains."},
        ],
    )
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "It rains."},
    ]


def test_two_answers_one_after_the_other_stay_two_messages(desk: Desk) -> None:
    found = messages(desk, [{"role": "assistant", "content": text} for text in "ab"])
    assert [message["content"] for message in found] == ["a", "b"]


def test_what_the_model_said_may_be_sent_back_as_it_came(desk: Desk) -> None:
    call = '{"name": "get_w", "arguments": {"a": 1}}'
    text = f"<think>Hm.</think>So: <tool_call>{call}</tool_call>"
    desk.script = Script(tokens=tuple(text))
    desk.context = planning(tool_calls="hermes", reasoning="qwen3")
    first = desk.respond(tools=[WEATHER])
    call_id = first["output"][-1]["call_id"]
    output = OUTPUT | {"call_id": call_id}
    given = [{"role": "user", "content": "Hi"}, *first["output"], output]
    by_hand = messages(desk, given, tools=[WEATHER])
    by_id = messages(desk, [output], tools=[WEATHER], previous_response_id=first["id"])
    assert by_hand == by_id
    assert by_hand[1]["reasoning"] == "Hm." and by_hand[1]["content"] == "So:"
    assert by_hand[1]["tool_calls"] == [CHAT_CALL | {"id": call_id}]


def test_a_reference_stands_for_an_item_of_a_stored_response(desk: Desk) -> None:
    (answer,) = desk.respond("one")["output"]
    for reference in ({"type": "item_reference", "id": answer["id"]}, {"id": answer["id"]}):
        found = messages(desk, [reference, {"role": "user", "content": "two"}])
        assert [message["content"] for message in found] == ["Hello, world!", "two"]
    with pytest.raises(InvalidRequest) as caught:
        desk.respond([{"type": "item_reference", "id": answer["id"]}], tenant="another")
    assert caught.value.param == "input[0].id"


def test_a_conversation_goes_on_without_its_instructions(desk: Desk) -> None:
    first = desk.respond("one", instructions="Be kind.")
    second = desk.respond("two", previous_response_id=first["id"], instructions="Be brief.")
    found = messages(desk, "three", previous_response_id=second["id"])
    assert [(message["role"], message["content"]) for message in found] == [
        ("user", "one"),
        ("assistant", "Hello, world!"),
        ("user", "two"),
        ("assistant", "Hello, world!"),
        ("user", "three"),
    ]


def test_a_conversation_may_go_on_from_one_place_in_two_ways(desk: Desk) -> None:
    first = desk.respond("one")
    for text in ("left", "right"):
        found = messages(desk, text, previous_response_id=first["id"])
        assert [message["content"] for message in found] == ["one", "Hello, world!", text]


def test_a_call_that_was_cut_is_no_part_of_the_conversation(desk: Desk) -> None:
    desk.script = Script(tokens=('{"a": ',) * 2)
    choice = {"type": "function", "name": "get_w"}
    first = desk.respond(tools=[WEATHER], tool_choice=choice, max_output_tokens=1)
    assert first["status"] == "incomplete"
    found = messages(desk, "Hm?", previous_response_id=first["id"])
    assert [message["role"] for message in found] == ["user", "user"]


def test_tools_are_given_to_the_template_as_a_chat_s_are(desk: Desk) -> None:
    desk.context = planning(tool_calls="hermes")
    desk.respond(tools=[WEATHER | {"strict": True}])
    function = {"name": "get_w", "description": "d", "parameters": {}, "strict": True}
    assert orjson.loads(desk.requests[-1].chat.tools_json) == [
        {"type": "function", "function": function}
    ]


def test_only_allowed_tools_are_called_freely_or_enforced(desk: Desk) -> None:
    desk.context = planning(tool_calls="hermes")
    tools = [WEATHER, WEATHER | {"name": "other"}]
    allowed = [{"type": "function", "name": "other"}]
    desk.script = Script(tokens=('<tool_call>{"name": "get_w"}</tool_call>',))
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
        response = desk.respond(tools=tools, tool_choice=choice)
        assert desk.requests[-1].HasField("constraint") is (mode == "required")
        assert [item["type"] for item in response["output"]] == ["message"]
        assert response["tool_choice"] == choice and len(response["tools"]) == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_w"}])
def test_required_and_named_calls_are_enforced_by_a_grammar(desk: Desk, choice: Any) -> None:
    desk.respond(tools=[WEATHER], tool_choice=choice)
    assert desk.requests[-1].HasField("constraint")
    desk.respond(tools=[WEATHER], tool_choice="none")
    assert not desk.requests[-1].HasField("constraint")


def test_the_form_of_the_text_is_a_constraint(desk: Desk) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    response = desk.respond(text={"format": wanted})
    assert orjson.loads(desk.requests[-1].constraint.spec) == schema
    assert response["text"]["format"] == wanted
    desk.respond(text={"format": {"type": "json_object"}})
    assert desk.requests[-1].HasField("constraint")
    desk.respond(text={"format": {"type": "text"}, "verbosity": "medium"})
    assert not desk.requests[-1].HasField("constraint")


def test_sampling_is_that_of_a_chat(desk: Desk) -> None:
    fields = {"temperature": 0.3, "top_p": 0.5, "seed": 7, "top_k": 3, "stop": ["x"]}
    desk.respond("Hi", **fields, max_output_tokens=5, reasoning={"effort": "low"})
    desk.chat(**fields, max_completion_tokens=5, reasoning_effort="low")
    ours, chats = desk.requests
    ours.key.Clear()
    chats.key.Clear()
    assert ours == chats


ITEM = "input[0]"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"given": []}, "input"),
    ({"given": 5}, "input"),
    ({"given": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"given": [5]}, ITEM),
    ({"given": [{"type": "web_search_call", "id": "x"}]}, ITEM),
    ({"given": [{"type": "custom_tool_call_output", "call_id": "x", "output": ""}]}, ITEM),
    ({"given": [{"role": "user"}]}, f"{ITEM}.content"),
    ({"given": [{"role": "tool", "content": "x"}]}, f"{ITEM}.role"),
    ({"given": [{"role": "user", "content": []}]}, f"{ITEM}.content"),
    (
        {"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        f"{ITEM}.content[0]",
    ),
    (
        {"given": [{"role": "user", "content": [{"type": "input_text"}]}]},
        f"{ITEM}.content[0].text",
    ),
    ({"given": [OUTPUT]}, f"{ITEM}.call_id"),
    ({"given": [{"type": "item_reference", "id": "msg_no"}]}, f"{ITEM}.id"),
    ({"given": [CALL | {"arguments": "{"}]}, f"{ITEM}.arguments"),
    ({"given": [{"type": "function_call", "name": "f", "arguments": ""}]}, f"{ITEM}.call_id"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 200}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"include": ["nonsense"]}, "include[0]"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {str(i): "b" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search_preview"}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "no"}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"function": {"name": "x"}}, "tools": [WEATHER]}, "tool_choice"),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "no"}],
            },
            "tools": [WEATHER],
        },
        "tool_choice",
    ),
    (
        {
            "tools": [WEATHER | {"parameters": {"type": "string"}}],
            "tool_choice": "required",
        },
        "tools[0].parameters",
    ),
    ({"tools": [WEATHER]}, "tools"),  # how this model writes calls is not known
    ({"truncation": "sometimes"}, "truncation"),
    ({"previous_response_id": "resp_no"}, "previous_response_id"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"conversation": "x"}, "conversation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"chat_template": "x"}, "chat_template"),
    ({"structured_outputs": {}}, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_wrong_is_refused_by_the_name_that_it_has_here(
    desk: Desk, fields: dict[str, Any], param: str
) -> None:
    error = refusal(desk, **fields)
    assert error.param == param
    assert param in error.message
    for name in ("messages", "max_completion_tokens", "response_format", ".function."):
        assert name not in error.message


def test_a_constraint_and_free_calls_are_refused_by_the_names_of_this_api(desk: Desk) -> None:
    desk.context = planning(tool_calls="pythonic")
    error = refusal(desk, tools=[WEATHER], text={"format": {"type": "json_object"}})
    assert error.param == "text.format" and error.message.startswith("text.format is not")


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("constraint", "text.format"),
        ("max_tokens", "max_output_tokens"),
        ("messages", "input"),
    ],
)
def test_what_the_other_services_refuse_has_the_name_that_it_has_here(
    desk: Desk, field: str, expected: str
) -> None:
    plan = desk.plan_response(max_output_tokens=5).plan
    assert plan.in_client_words(InvalidRequest("no", param=field)).param == expected


def test_an_answer_that_does_not_fit_is_told_with_the_field_of_this_route(desk: Desk) -> None:
    plan = desk.plan_response(max_output_tokens=9).plan
    told = plan.in_client_words(InvalidRequest("lower max_tokens", param="max_tokens"))
    assert told.message == "lower max_output_tokens"


def test_harmless_values_of_what_is_refused_are_taken(desk: Desk) -> None:
    desk.respond(
        truncation="disabled",
        reasoning={"summary": "auto", "generate_summary": None, "mode": "standard"},
        text={"verbosity": "medium"},
        include=["reasoning.encrypted_content"],
        conversation=None,
        background=False,
        n=1,
        unknown_field=1,
    )
