"""POST /v1/responses: what comes out, whole and in events."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import InvalidRequest, Overloaded, RequestFailed, SluicewayError
from services.common.pb import common_pb2 as pb
from tests.fakes.tokenizer import Script
from tests.unit.gateway.desk import NOW, Body, Desk, named_events, planning

WEATHER = {"type": "function", "name": "get_w", "parameters": {}}
CALL = '{"name": "get_w", "arguments": {"a": 1}}'
THOUGHT_AND_CALLS = Script(
    tokens=(
        *("<think>", "Hm", ".", "</think>", "\n"),
        *("One:", f" <tool_call>{CALL[:9]}", f"{CALL[9:]}</tool_call>", " two: "),
        *(f"<tool_call>{CALL}</tool_call>", " three"),
    )
)


def texts(response: Body) -> list[str]:
    """The text of each message."""
    return [
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]


def test_a_response_says_what_was_asked_for_and_what_came(desk: Desk) -> None:
    desk.script = Script(cached_tokens=1)
    response = desk.respond(
        "Hi there",
        instructions="Be kind.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=9,
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
        reasoning={"effort": "low"},
    )
    (message,) = response.pop("output")
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "Hello, world!", "annotations": [], "logprobs": []}
        ],
    }
    assert response.pop("id").startswith("resp_")
    assert response == {
        "object": "response",
        "created_at": NOW,
        "completed_at": NOW,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "fake",
        "usage": {
            "input_tokens": 6,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
        "background": False,
        "instructions": "Be kind.",
        "max_output_tokens": 9,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": None},
        "safety_identifier": "s",
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 0.9,
        "truncation": "disabled",
        "user": "u",
    }


def test_the_events_of_a_text_come_in_their_order_and_join_to_it(desk: Desk) -> None:
    events = desk.response_events()
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(["output_text.delta"] * 4),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(e["delta"] for e in events if "delta" in e) == "Hello, world!"
    created, running, added, part = events[:4]
    assert created["response"]["status"] == running["response"]["status"] == "in_progress"
    assert created["response"]["output"] == [] and created["response"]["usage"] is None
    assert added["item"]["status"] == "in_progress" and added["item"]["content"] == []
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    text, part, item, last = events[-4:]
    assert text["text"] == part["part"]["text"] == "Hello, world!"
    assert last["response"]["output"] == [item["item"]]
    assert item["item"]["content"] == [part["part"]] and item["item"]["status"] == "completed"
    assert {event["item_id"] for event in events if "item_id" in event} == {item["item"]["id"]}


def test_thought_text_and_calls_are_items_in_the_order_in_which_they_come(desk: Desk) -> None:
    desk.script = THOUGHT_AND_CALLS
    desk.context = planning(tool_calls="hermes", reasoning="qwen3")
    response = desk.respond(tools=[WEATHER])
    found = [item.get("arguments") or item["content"][0]["text"] for item in response["output"]]
    assert found == ["Hm.", "One:", '{"a": 1}', "two:", '{"a": 1}', "three"]
    thought, _, call, *_ = response["output"]
    assert thought["type"] == "reasoning" and thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert call["id"].startswith("fc_") and call["call_id"].startswith("call_")
    assert len({item["id"] for item in response["output"]}) == 6
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


def test_every_item_is_added_told_and_done_before_the_next(desk: Desk) -> None:
    desk.script = THOUGHT_AND_CALLS
    desk.context = planning(tool_calls="hermes", reasoning="qwen3")
    events = desk.response_events(tools=[WEATHER])
    last = events[-1]["response"]["output"]
    for index, item in enumerate(last):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1] == events[own[-1]["sequence_number"]]
        assert own[-1]["type"] == "response.output_item.done" and own[-1]["item"] == item
        numbers = [event["sequence_number"] for event in own]
        assert numbers == list(range(numbers[0], numbers[0] + len(own)))
        told = "".join(event["delta"] for event in own if "delta" in event)
        assert told == (item.get("arguments") or item["content"][0]["text"])
    kinds = [event["type"] for event in events if event.get("output_index") == 2]
    assert kinds[-2] == "response.function_call_arguments.done"
    kinds = [event["type"] for event in events if event.get("output_index") == 0]
    assert kinds[-3:-1] == ["response.reasoning_text.done", "response.content_part.done"]


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [WEATHER]},
    "one call": {"tools": [WEATHER], "parallel_tool_calls": False},
    "required calls": {"tools": [WEATHER], "tool_choice": "required"},
    "a named call": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "get_w"},
    },
    "log-probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "no thought shown": {"include_reasoning": False, "top_logprobs": 1},
    "length": {"max_output_tokens": 2},
    "schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
}
SCRIPTS = {
    "token by token": Script(),
    "several tokens per delta": Script(tokens_per_delta=3),
    "bytes of characters": Script(tokens=(b"\xe6\x97", b"\xa5", "本", b"\xf0\x9f", b"\x8c\xb6")),
    "nothing": Script(tokens=()),
    "cut inside a character": Script(tokens=(b"\xf0\x9f",), reason=pb.FINISH_REASON_LENGTH),
    "a thought and calls": THOUGHT_AND_CALLS,
    "letter by letter": Script(tokens=tuple("<think>Hm.</think>Yes.")),
    "enforced calls": Script(tokens=(f"[{CALL}", ", ", f"{CALL}]")),
    "a thought that is cut": Script(tokens=("<think>", "Hm"), reason=pb.FINISH_REASON_LENGTH),
}


def without_ids(value: Any) -> Any:
    """The same without what is drawn anew for every reply."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id")}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
@pytest.mark.parametrize("fields", FEATURES.values(), ids=list(FEATURES))
def test_a_stream_ends_in_the_response_that_an_unstreamed_request_gets(
    desk: Desk, fields: dict[str, Any], script: Script
) -> None:
    desk.script = script
    needs_grammar = "schema" in str(fields) or "tool_choice" in fields
    is_free = "tools" in fields and "tool_choice" not in fields
    desk.context = planning(
        tool_calls="hermes" if is_free else "none", reasoning="none" if needs_grammar else "qwen3"
    )
    whole = desk.respond(**fields)
    events = desk.response_events(**fields)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    logprobs = [
        entry for event in events if "delta" in event for entry in event.get("logprobs", [])
    ]
    assert logprobs == [
        entry
        for item in whole["output"]
        if item["type"] == "message"
        for part in item["content"]
        for entry in part["logprobs"]
    ]


def test_log_probabilities_are_those_of_the_answer_and_not_of_the_thought(desk: Desk) -> None:
    desk.script = Script(tokens=("<think>", "Hm", "</think>", "Yes", "."))
    desk.context = planning(reasoning="qwen3")
    response = desk.respond(top_logprobs=2)
    (part,) = response["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["Yes", "."]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2, 2]
    assert response["top_logprobs"] == 2


def test_no_log_probabilities_unless_they_are_asked_for(desk: Desk) -> None:
    assert desk.respond()["output"][0]["content"][0]["logprobs"] == []
    asked = desk.respond(include=["message.output_text.logprobs"])
    assert [e["token"] for e in asked["output"][0]["content"][0]["logprobs"]] == [
        *("Hello", ",", " world", "!")
    ]


def test_what_is_cut_is_incomplete_and_says_why(desk: Desk) -> None:
    response = desk.respond(max_output_tokens=2)
    assert response["status"] == "incomplete" and response["completed_at"] is None
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and texts(response) == ["Hello,"]
    *_, item, last = desk.response_events(max_output_tokens=2)
    assert last["type"] == "response.incomplete" and item["item"]["status"] == "incomplete"


def test_a_call_is_incomplete_only_if_its_arguments_are(desk: Desk) -> None:
    choice = {"type": "function", "name": "get_w"}
    for arguments, status in (('{"a": 1}', "completed"), ('{"a": ', "incomplete")):
        desk.script = Script(tokens=(arguments,), reason=pb.FINISH_REASON_LENGTH)
        response = desk.respond(tools=[WEATHER], tool_choice=choice)
        assert response["status"] == "incomplete"
        assert response["output"][0]["status"] == status


def test_an_answer_of_nothing_is_an_empty_message(desk: Desk) -> None:
    desk.script = Script(tokens=())
    assert texts(desk.respond(max_output_tokens=9)) == [""]
    desk.script = Script(tokens=("<think>", "Hm", "</think>"))
    desk.context = planning(reasoning="qwen3")
    types = [item["type"] for item in desk.respond()["output"]]
    assert types == ["reasoning", "message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestFailed("NaN"), "server_error"),
        (Overloaded("full"), "rate_limit_exceeded"),
        (InvalidRequest("no", param="text.format"), "invalid_prompt"),
    ],
)
def test_a_failure_ends_the_stream_with_the_failed_response(
    desk: Desk, error: SluicewayError, code: str
) -> None:
    planned = desk.plan_response(stream=True)
    (first, *rest) = desk.updates(planned.plan)
    written = b"".join(planned.reply.events(*update) for update in (first, rest[0]))
    *_, item, last = named_events(written + planned.reply.fail(error))
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == code
    assert last["response"]["error"]["message"] == error.message
    assert item["type"] == "response.output_item.done" and item["item"]["status"] == "incomplete"
    assert planned.reply.fail(error) == b""
    kept = desk.store.get("", planned.reply.response_id)
    assert b'"failed"' in kept.response


def test_what_has_ended_is_neither_cancelled_nor_failed(desk: Desk) -> None:
    planned = desk.plan_response(stream=True)
    for update in desk.updates(planned.plan):
        planned.reply.events(*update)
    planned.reply.last_events()
    ended = planned.reply.as_json()
    assert planned.reply.cancel() == planned.reply.fail(RequestFailed("NaN")) == b""
    assert planned.reply.as_json() == ended and ended["status"] == "completed"


def test_a_failure_before_the_first_event_is_told_with_the_response(desk: Desk) -> None:
    events = named_events(desk.plan_response(stream=True).reply.fail(RequestFailed("NaN")))
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
