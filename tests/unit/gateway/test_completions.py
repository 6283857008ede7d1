"""POST /v1/completions: prompts in all their forms, choices in order, echo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.conftest import Front, events


async def test_a_completion_is_answered_with_text_finish_and_usage(front: Front) -> None:
    response = await front.complete("one two three")
    assert response.status_code == 200, response.text
    reply = response.json()
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    (choice,) = reply["choices"]
    assert choice["text"] == "Hello, world!"
    assert choice["index"] == 0
    assert choice["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == 3


async def test_a_streamed_completion_is_text_finish_done(front: Front) -> None:
    *chunks, last, done = events(await front.complete(stream=True))
    assert [c["choices"][0]["text"] for c in chunks] == ["Hello", ",", " world", "!"]
    assert last["choices"][0]["text"] == ""
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


async def test_sixteen_tokens_unless_said_otherwise(front: Front) -> None:
    await front.complete()
    assert front.tokenizer.requests[0].sampling.max_tokens == 16


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
async def test_a_prompt_may_be_text_ids_or_a_list_of_either(
    front: Front, prompt: Any, kinds: list[str], num_tokens: int
) -> None:
    reply = (await front.complete(prompt)).json()
    assert len(reply["choices"]) == len(kinds)
    assert reply["usage"]["prompt_tokens"] == num_tokens
    assert sorted(r.WhichOneof("prompt") for r in front.tokenizer.requests) == sorted(kinds)


async def test_choices_of_a_batch_come_in_prompt_order(front: Front) -> None:
    reply = (await front.complete(["a", "b"], n=2)).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == ["Hello, world!", "1:Hello, world!"] * 2
    assert reply["usage"]["completion_tokens"] == 2 * (4 + 5)
    assert reply["usage"]["prompt_tokens"] == 2


async def test_a_streamed_batch_joins_to_the_whole_one(front: Front) -> None:
    whole = (await front.complete(["a", "b b", "c"], n=2)).json()
    *chunks, _ = events(await front.complete(["a", "b b", "c"], n=2, stream=True))
    joined = [""] * 6
    for chunk in chunks:
        choice = chunk["choices"][0]
        joined[choice["index"]] += choice["text"]
    assert joined == [choice["text"] for choice in whole["choices"]]


async def test_prompts_of_a_batch_have_ids_of_their_own(front: Front) -> None:
    await front.complete(["a", "b"])
    assert len({request.key.request_id for request in front.tokenizer.requests}) == 2


async def test_if_one_prompt_of_a_batch_is_refused_nothing_is_left_running(front: Front) -> None:
    response = await front.complete([[5], [999_999]])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt[1][0]"
    assert front.tokenizer.num_running == 0


async def test_echo_puts_the_prompt_in_front(front: Front) -> None:
    reply = (await front.complete("one two", echo=True)).json()
    assert reply["choices"][0]["text"] == "one twoHello, world!"
    assert reply["usage"]["completion_tokens"] == 4


async def test_echo_of_token_ids_is_their_text(front: Front) -> None:
    ids = front.tokenizer.vocabulary.encode("one two")
    reply = (await front.complete(ids, echo=True)).json()
    assert reply["choices"][0]["text"] == "one twoHello, world!"


async def test_echo_of_a_stream_comes_first(front: Front) -> None:
    first, *_ = events(await front.complete("one two", echo=True, stream=True))
    assert first["choices"][0]["text"] == "one two"


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}], ids=["plain", "logprobs"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_echo_with_no_tokens_gives_the_prompt_alone(
    front: Front, fields: dict[str, Any], stream: bool
) -> None:
    response = await front.complete(
        "one two three", echo=True, max_tokens=0, stream=stream, **fields
    )
    assert response.status_code == 200, response.text
    if stream:
        choices = [c["choices"][0] for c in events(response)[:-1]]
        text = "".join(choice["text"] for choice in choices)
        logprobs = choices[0]["logprobs"]
        assert choices[-1]["finish_reason"] == "length"
    else:
        reply = response.json()
        text = reply["choices"][0]["text"]
        logprobs = reply["choices"][0]["logprobs"]
        assert reply["usage"]["completion_tokens"] == 0
        assert reply["choices"][0]["finish_reason"] == "length"
    assert text == "one two three"
    if fields:
        assert logprobs["tokens"] == ["one", " two", " three"]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5]


async def test_add_special_tokens_reaches_the_tokenizer(front: Front) -> None:
    await front.complete(add_special_tokens=False)
    assert front.tokenizer.requests[0].add_special_tokens is False
