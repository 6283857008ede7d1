"""POST /v1/completions: prompts in all their forms, choices in order, echo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.desk import Desk


def test_a_completion_is_answered_with_text_finish_and_usage(desk: Desk) -> None:
    reply = desk.complete("one two three")
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    (choice,) = reply["choices"]
    assert choice["text"] == "Hello, world!"
    assert choice["index"] == 0
    assert choice["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == 3


def test_a_streamed_completion_is_text_finish_done(desk: Desk) -> None:
    *chunks, last, done = desk.complete_events()
    assert [c["choices"][0]["text"] for c in chunks] == ["Hello", ",", " world", "!"]
    assert last["choices"][0]["text"] == ""
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


def test_sixteen_tokens_unless_said_otherwise(desk: Desk) -> None:
    desk.complete()
    assert desk.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "kinds", "num_tokens"),
    [
        ("one two", ["text"], 2),
        (["one two", "three"], ["text", "text"], 3),
        ([33, 216, 34], ["ids"], 3),
        ([[33, 216, 34], [5]], ["ids", "ids"], 4),
        (["one", [5, 6]], ["text", "ids"], 3),
    ],
    ids=["text", "texts", "ids", "lists of ids", "mixed"],
)
def test_a_prompt_may_be_text_ids_or_a_list_of_either(
    desk: Desk, prompt: Any, kinds: list[str], num_tokens: int
) -> None:
    reply = desk.complete(prompt)
    assert len(reply["choices"]) == len(kinds)
    assert reply["usage"]["prompt_tokens"] == num_tokens
    assert sorted(r.WhichOneof("prompt") for r in desk.requests) == sorted(kinds)


def test_choices_of_a_batch_come_in_prompt_order(desk: Desk) -> None:
    reply = desk.complete(["a", "b"], n=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == ["Hello, world!", "1:Hello, world!"] * 2
    assert reply["usage"]["completion_tokens"] == 2 * (4 + 5)
    assert reply["usage"]["prompt_tokens"] == 2


def test_a_streamed_batch_joins_to_the_whole_one(desk: Desk) -> None:
    whole = desk.complete(["a", "b b", "c"], n=2)
    *chunks, _ = desk.complete_events(["a", "b b", "c"], n=2)
    joined = [""] * 6
    for chunk in chunks:
        choice = chunk["choices"][0]
        joined[choice["index"]] += choice["text"]
    assert joined == [choice["text"] for choice in whole["choices"]]


def test_prompts_of_a_batch_have_ids_of_their_own(desk: Desk) -> None:
    desk.complete(["a", "b"])
    assert len({request.key.request_id for request in desk.requests}) == 2


def test_echo_puts_the_prompt_in_front(desk: Desk) -> None:
    reply = desk.complete("one two", echo=True)
    assert reply["choices"][0]["text"] == "one twoHello, world!"
    assert reply["usage"]["completion_tokens"] == 4


def test_echo_of_token_ids_is_their_text(desk: Desk) -> None:
    ids = desk.vocabulary.encode("one two")
    reply = desk.complete(ids, echo=True)
    assert reply["choices"][0]["text"] == "one twoHello, world!"


def test_echo_of_a_stream_comes_first(desk: Desk) -> None:
    first, *_ = desk.complete_events("one two", echo=True)
    assert first["choices"][0]["text"] == "one two"


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}], ids=["plain", "logprobs"])
def test_echo_with_no_tokens_gives_the_prompt_alone(desk: Desk, fields: dict[str, Any]) -> None:
    reply = desk.complete("one two three", echo=True, max_tokens=0, **fields)
    (choice,) = reply["choices"]
    assert choice["text"] == "one two three"
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    if fields:
        assert choice["logprobs"]["tokens"] == ["one", " two", " three"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    echo, end, done = desk.complete_events("one two three", echo=True, max_tokens=0, **fields)
    assert echo["choices"][0]["text"] == "one two three"
    assert echo["choices"][0]["logprobs"] == choice["logprobs"]
    assert end["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert done == "[DONE]"


def test_add_special_tokens_reaches_the_tokenizer(desk: Desk) -> None:
    desk.complete(add_special_tokens=False)
    assert desk.requests[0].add_special_tokens is False
