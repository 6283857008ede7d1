"""Log-probabilities of chat and completions, of the answer and of the prompt."""

from __future__ import annotations

import math

import pytest

from services.common.pb import common_pb2 as pb
from tests.fakes.tokenizer import Script
from tests.unit.gateway.desk import Desk

PEPPER = (b"\xf0\x9f", b"\x8c", b"\xb6")


def test_chat_has_one_entry_per_token_and_no_alternatives_unless_asked(desk: Desk) -> None:
    reply = desk.chat(logprobs=True)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["Hello", ",", " world", "!"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert entries[0]["bytes"] == list(b"Hello")
    assert entries[0]["logprob"] == -0.5


def test_chat_gives_as_many_alternatives_as_asked(desk: Desk) -> None:
    reply = desk.chat(logprobs=True, top_logprobs=3)
    tops = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [(top["token"], top["logprob"]) for top in tops] == [
        ("Hello", -0.5),
        ("alt1", -1.5),
        ("alt2", -2.5),
    ]


def test_a_token_that_is_part_of_a_character_keeps_its_own_bytes(desk: Desk) -> None:
    desk.script = Script(tokens=PEPPER)
    reply = desk.chat(logprobs=True, top_logprobs=1)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[240, 159], [140], [182]]
    assert "".join(entry["token"] for entry in entries) == "🌶"
    assert entries[0]["top_logprobs"][0]["token"] == r"bytes:\xf0\x9f"


@pytest.mark.parametrize("tokens", [("Hello", ",", " world"), PEPPER], ids=["text", "bytes"])
def test_streamed_entries_are_those_of_the_whole_reply(
    desk: Desk, tokens: tuple[str | bytes, ...]
) -> None:
    desk.script = Script(tokens=tokens)
    whole = desk.chat(logprobs=True, top_logprobs=2)
    *chunks, _ = desk.chat_events(logprobs=True, top_logprobs=2)
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert len(streamed) == len(tokens)


def test_completions_tokens_join_to_the_text_with_true_offsets(desk: Desk) -> None:
    desk.script = Script(tokens=("é", *PEPPER, " end"))
    reply = desk.complete("one two", echo=True, logprobs=1)
    choice = reply["choices"][0]
    columns = choice["logprobs"]
    assert "".join(columns["tokens"]) == choice["text"] == "one twoé🌶 end"
    lengths = [len(token) for token in columns["tokens"]]
    assert columns["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    assert all(value == -0.5 for value in columns["token_logprobs"][1:])


def test_tokens_join_to_the_text_where_the_prompt_begins_with_part_of_a_character(
    desk: Desk,
) -> None:
    ids = [desk.vocabulary.id_of(piece) for piece in (*PEPPER, b" hot")]
    choice = desk.complete(ids, echo=True, logprobs=1)["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "🌶 hotHello, world!"


def test_tokens_join_to_the_text_where_the_choice_ends_inside_a_character(desk: Desk) -> None:
    desk.script = Script(tokens=("Hi", PEPPER[0]), reason=pb.FINISH_REASON_LENGTH)
    choice = desk.complete(logprobs=1)["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "Hi\ufffd"
    entries = desk.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert entries[-1]["token"] == "\ufffd"
    assert entries[-1]["bytes"] == list(PEPPER[0])


def test_completions_alternatives_name_the_token_that_was_taken(desk: Desk) -> None:
    reply = desk.complete(logprobs=0)
    tops = reply["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == [{"Hello": -0.5}, {",": -0.5}, {" world": -0.5}, {"!": -0.5}]
    reply = desk.complete(logprobs=2)
    assert reply["choices"][0]["logprobs"]["top_logprobs"][0] == {"Hello": -0.5, "alt1": -1.5}


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_completion_has_the_columns_of_the_whole_one(desk: Desk, n: int) -> None:
    fields = {"echo": True, "logprobs": 2, "n": n}
    whole = desk.complete("one two", **fields)
    *chunks, _ = desk.complete_events("one two", **fields)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        for name, column in choice["logprobs"].items():
            parts = [c["logprobs"][name] for c in mine if c["logprobs"]]
            assert [value for part in parts for value in part] == column, name


def test_minus_infinity_is_written_as_a_finite_number(desk: Desk) -> None:
    desk.script = Script(logprob=-math.inf)
    reply = desk.complete(logprobs=1)
    assert set(reply["choices"][0]["logprobs"]["token_logprobs"]) == {-9999.0}
    reply = desk.chat(logprobs=True)
    assert reply["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_prompt_logprobs_begin_with_null(desk: Desk) -> None:
    reply = desk.complete("one two three", prompt_logprobs=2)
    first, second, third = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    (two,) = desk.vocabulary.encode(" two")
    assert second[str(two)] == {"logprob": -0.5, "rank": 1, "decoded_token": " two"}
    assert len(second) == len(third) == 2


def test_prompt_logprobs_of_a_chat_are_on_the_reply(desk: Desk) -> None:
    reply = desk.chat(prompt_logprobs=0)
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]


def test_tokens_can_be_named_by_id(desk: Desk) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    reply = desk.chat(logprobs=True, top_logprobs=1, **fields)
    entry = reply["choices"][0]["logprobs"]["content"][0]
    (hello,) = desk.vocabulary.encode("Hello")
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{hello}"
    reply = desk.complete(logprobs=1, **fields)
    assert reply["choices"][0]["logprobs"]["tokens"] == [f"token_id:{hello}"]


@pytest.mark.parametrize("pieces", [PEPPER[:2], PEPPER[1:], (b"\x8c",)], ids=str)
def test_an_echoed_prompt_that_is_broken_inside_a_character_names_no_other_one(
    desk: Desk, pieces: tuple[bytes, ...]
) -> None:
    ids = [desk.vocabulary.id_of(piece) for piece in pieces]
    choice = desk.complete(prompt=ids, echo=True, logprobs=1)["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    assert set("".join(tokens[: len(pieces)])) <= {"\ufffd"}
    assert tokens[len(pieces) :] == ["Hello", ",", " world", "!"]


def test_an_echoed_prompt_that_begins_with_a_character_of_several_tokens_joins_to_its_text(
    desk: Desk,
) -> None:
    ids = [desk.vocabulary.id_of(piece) for piece in (*PEPPER, b" hot")]
    choice = desk.complete(prompt=ids, echo=True, logprobs=1)["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "🌶 hotHello, world!"
