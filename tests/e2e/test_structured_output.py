"""Constrained answers over HTTP: valid and ended, whatever else the request asks for.

The model is a tiny random one: what it says makes sense only because it must.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.system import DONE, System

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "it", "schema": schema, "strict": True},
    }


WILD = {"temperature": 2.0, "seed": 5, "max_tokens": 600}


def require_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert re.fullmatch("[a-z]{3,12}", person["name"])
    assert 0 <= person["age"] <= 120


def test_a_schema_holds_for_every_choice_with_logprobs_streamed_and_not(system: System) -> None:
    fields = {**WILD, "response_format": format_of(PERSON), "n": 3, "logprobs": True}
    whole = system.chat(**fields)
    assert whole.status_code == 200, whole.text
    texts = []
    for choice in whole.json()["choices"]:
        texts.append(choice["message"]["content"])
        require_person(texts[-1])
        assert choice["finish_reason"] == "stop"
        told = b"".join(bytes(entry["bytes"] or []) for entry in choice["logprobs"]["content"])
        assert told.decode().startswith(texts[-1])  # the end-of-sequence token may follow
    assert len(set(texts)) > 1
    with system.stream(**fields) as events:
        seen = list(events)
    assert seen.pop() is DONE
    pieces = [""] * 3
    for choice in (choice for event in seen for choice in event["choices"]):
        pieces[choice["index"]] += choice["delta"].get("content") or ""
    assert pieces == texts


def test_a_stop_string_ends_a_constrained_answer(system: System) -> None:
    constraint = {"regex": "(ab){10}c"}
    reply = system.chat(structured_outputs=constraint, stop=["baba"], **WILD).json()
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "a"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "baba"


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[0-9]{3}-(x|yy)"}, "[0-9]{3}-(x|yy)"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" ("b" | "d") "c"\n'}, "a(b|d)c"),
        ({"json": PERSON}, r"\{.*\}"),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_each_kind_of_constraint_holds(
    system: System, constraint: dict[str, Any], pattern: str
) -> None:
    (choice,) = system.chat(structured_outputs=constraint, **WILD).json()["choices"]
    assert re.fullmatch(pattern, choice["message"]["content"], re.DOTALL)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_400_that_names_it(system: System, stream: bool) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    reply = system.chat(response_format=format_of(schema), stream=stream)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "response_format"
    assert "uniqueItems" in error["message"]


def test_other_requests_run_beside_a_constrained_one_unchanged(system: System) -> None:
    fields = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    alone = system.chat("Tell me a story.", **fields).json()["choices"][0]["message"]["content"]
    with system.stream(response_format=format_of(PERSON), **WILD) as constrained:
        next(constrained)
        beside = system.chat("Tell me a story.", **fields).json()
    assert beside["choices"][0]["message"]["content"] == alone
