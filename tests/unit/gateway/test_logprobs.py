"""Log-probabilities of chat and completions, of the answer and of the prompt."""

from __future__ import annotations

import math

import pytest

from tests.fakes.tokenizer import Script
from tests.unit.gateway.conftest import Front, events

PEPPER = (b"\xf0\x9f", b"\x8c", b"\xb6")


async def test_chat_has_one_entry_per_token_and_no_alternatives_unless_asked(front: Front) -> None:
    reply = (await front.chat(logprobs=True)).json()
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["Hello", ",", " world", "!"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert entries[0]["bytes"] == list(b"Hello")
    assert entries[0]["logprob"] == -0.5


async def test_chat_gives_as_many_alternatives_as_asked(front: Front) -> None:
    reply = (await front.chat(logprobs=True, top_logprobs=3)).json()
    tops = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [(top["token"], top["logprob"]) for top in tops] == [
        ("Hello", -0.5),
        ("alt1", -1.5),
        ("alt2", -2.5),
    ]


async def test_a_token_that_is_part_of_a_character_keeps_its_own_bytes(front: Front) -> None:
    front.tokenizer.script = Script(tokens=PEPPER)
    reply = (await front.chat(logprobs=True, top_logprobs=1)).json()
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[240, 159], [140], [182]]
    assert "".join(entry["token"] for entry in entries) == "🌶"
    assert entries[0]["top_logprobs"][0]["token"] == r"bytes:\xf0\x9f"


@pytest.mark.parametrize("tokens", [("Hello", ",", " world"), PEPPER], ids=["text", "bytes"])
async def test_streamed_entries_are_those_of_the_whole_reply(
    front: Front, tokens: tuple[str | bytes, ...]
) -> None:
    front.tokenizer.script = Script(tokens=tokens)
    whole = (await front.chat(logprobs=True, top_logprobs=2)).json()
    *chunks, _ = events(await front.chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert len(streamed) == len(tokens)


async def test_completions_tokens_join_to_the_text_with_true_offsets(front: Front) -> None:
    front.tokenizer.script = Script(tokens=("é", *PEPPER, " end"))
    reply = (await front.complete("one two", echo=True, logprobs=1)).json()
    choice = reply["choices"][0]
    columns = choice["logprobs"]
    assert "".join(columns["tokens"]) == choice["text"] == "one twoé🌶 end"
    lengths = [len(token) for token in columns["tokens"]]
    assert columns["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    assert all(value == -0.5 for value in columns["token_logprobs"][1:])


async def test_completions_alternatives_name_the_token_that_was_taken(front: Front) -> None:
    reply = (await front.complete(logprobs=0)).json()
    tops = reply["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == [{"Hello": -0.5}, {",": -0.5}, {" world": -0.5}, {"!": -0.5}]
    reply = (await front.complete(logprobs=2)).json()
    assert reply["choices"][0]["logprobs"]["top_logprobs"][0] == {"Hello": -0.5, "alt1": -1.5}


@pytest.mark.parametrize("n", [1, 2])
async def test_a_streamed_completion_has_the_columns_of_the_whole_one(front: Front, n: int) -> None:
    fields = {"echo": True, "logprobs": 2, "n": n}
    whole = (await front.complete("one two", **fields)).json()
    *chunks, _ = events(await front.complete("one two", stream=True, **fields))
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        for name, column in choice["logprobs"].items():
            parts = [c["logprobs"][name] for c in mine if c["logprobs"]]
            assert [value for part in parts for value in part] == column, name


async def test_minus_infinity_is_written_as_a_finite_number(front: Front) -> None:
    front.tokenizer.script = Script(logprob=-math.inf)
    reply = (await front.complete(logprobs=1)).json()
    assert set(reply["choices"][0]["logprobs"]["token_logprobs"]) == {-9999.0}
    reply = (await front.chat(logprobs=True)).json()
    assert reply["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_prompt_logprobs_begin_with_null(front: Front) -> None:
    reply = (await front.complete("one two three", prompt_logprobs=2)).json()
    first, second, third = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    (two,) = front.tokenizer.vocabulary.encode(" two")
    assert second[str(two)] == {"logprob": -0.5, "rank": 1, "decoded_token": " two"}
    assert len(second) == len(third) == 2


async def test_prompt_logprobs_of_a_chat_are_on_the_reply(front: Front) -> None:
    reply = (await front.chat(prompt_logprobs=0)).json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]


async def test_tokens_can_be_named_by_id(front: Front) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    reply = (await front.chat(logprobs=True, top_logprobs=1, **fields)).json()
    entry = reply["choices"][0]["logprobs"]["content"][0]
    (hello,) = front.tokenizer.vocabulary.encode("Hello")
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{hello}"
    reply = (await front.complete(logprobs=1, **fields)).json()
    assert reply["choices"][0]["logprobs"]["tokens"] == [f"token_id:{hello}"]
