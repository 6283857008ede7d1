"""One request between scheduler and client: merging, hidden stop tokens, ends, resuming."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import InvalidRequest, Overloaded, WorkerLost
from services.tokenizer.encode import Encoder
from services.tokenizer.generation import Delta, Generation
from services.tokenizer.text_output import TextOutput
from services.tokenizer.tokens import (
    Finished,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Queued,
    Usage,
)

LENGTH = Finished(FinishReason.LENGTH)
STOP = Finished(FinishReason.STOP)
EOS = 2


def ids(encoder: Encoder, text: str) -> list[int]:
    return encoder.encode_now(text, add_special_tokens=False, param="text")


def generation(
    encoder: Encoder,
    *,
    n: int = 1,
    stops: tuple[str, ...] = (),
    include_stop: bool = False,
    skip: bool = True,
) -> Generation:
    outputs = {
        index: TextOutput(
            encoder.detokenizer([], skip_special_tokens=skip),
            stops=stops,
            include_stop=include_stop,
        )
        for index in range(n)
    }
    return Generation([7, 8], outputs, eos_token_ids=frozenset({EOS}), include_stop=include_stop)


async def taken(made: Generation) -> Delta:
    delta = await asyncio.wait_for(made.next(), 1)
    assert delta is not None
    return delta


async def test_the_first_delta_brings_the_prompt_and_comes_with_the_acceptance(
    encoder: Encoder,
) -> None:
    made = generation(encoder)
    made.on_queued(0, Queued(3, 250))
    first = await taken(made)
    assert (first.prompt_ids, first.queued, first.choices) == ([7, 8], Queued(3, 250), [])
    made.on_tokens(0, ids(encoder, "hi"), None, None)
    assert (await taken(made)).prompt_ids is None


async def test_deltas_that_are_not_taken_are_merged_and_nothing_is_lost(encoder: Encoder) -> None:
    made = generation(encoder)
    parts = ["hello", " 🌶", " world"]
    for part in parts:
        for token_id in ids(encoder, part):
            rows = Logprobs([0], [-0.5], [1], [1], [token_id], [-0.5])
            made.on_tokens(0, [token_id], rows, None)
    made.on_tokens(0, [], None, LENGTH)
    (choice,) = (await taken(made)).choices
    assert choice.text == "hello 🌶 world"
    assert choice.token_ids == [i for part in parts for i in ids(encoder, part)]
    assert choice.logprobs is not None
    assert choice.logprobs.positions == list(range(len(choice.token_ids)))
    assert choice.logprobs.top_ids == choice.token_ids
    assert choice.finish is not None
    assert await made.next() is None


async def test_counts_before_each_delta_add_up(encoder: Encoder) -> None:
    made = generation(encoder)
    num_tokens = num_chars = 0
    for token_id in ids(encoder, "a🌶b 日本 c"):
        made.on_tokens(0, [token_id], None, None)
        (choice,) = (await taken(made)).choices
        assert (choice.num_tokens, choice.num_chars) == (num_tokens, num_chars)
        num_tokens += len(choice.token_ids)
        num_chars += len(choice.text)
    assert num_chars == len("a🌶b 日本 c")


async def test_choices_are_told_apart_and_each_ends_once(encoder: Encoder) -> None:
    made = generation(encoder, n=3)
    for index, text in enumerate(("one", "two", "three")):
        made.on_tokens(index, ids(encoder, text), None, LENGTH)
    delta = await taken(made)
    assert {c.index: c.text for c in delta.choices} == {0: "one", 1: "two", 2: "three"}
    assert all(c.finish is not None for c in delta.choices)
    assert await made.next() is None


@pytest.mark.parametrize(
    ("include_stop", "skip", "text"),
    [(False, True, "hi"), (False, False, "hi"), (True, True, "hi"), (True, False, "hi<|im_end|>")],
)
async def test_the_eos_that_ends_a_choice_counts_but_is_shown_only_if_wanted(
    encoder: Encoder, include_stop: bool, skip: bool, text: str
) -> None:
    made = generation(encoder, include_stop=include_stop, skip=skip)
    output = [*ids(encoder, "hi"), EOS]
    made.on_tokens(0, output, None, STOP)
    (choice,) = (await taken(made)).choices
    assert (choice.text, choice.token_ids) == (text, output)


@pytest.mark.parametrize(("include_stop", "text"), [(False, "hi"), (True, "hi!")])
async def test_a_stop_token_counts_but_is_shown_only_if_wanted(
    encoder: Encoder, include_stop: bool, text: str
) -> None:
    made = generation(encoder, include_stop=include_stop)
    output = [*ids(encoder, "hi"), *ids(encoder, "!")]
    made.on_tokens(0, output, None, Finished(FinishReason.STOP, stop_token_id=output[-1]))
    (choice,) = (await taken(made)).choices
    assert (choice.text, choice.token_ids) == (text, output)


async def test_an_eos_that_does_not_end_a_choice_is_ordinary(encoder: Encoder) -> None:
    made = generation(encoder, skip=False)
    made.on_tokens(0, [EOS, EOS], None, LENGTH)
    (choice,) = (await taken(made)).choices
    assert choice.text == "<|im_end|><|im_end|>"


async def test_a_stop_string_ends_the_text_at_once_and_says_how_many_tokens_are_kept(
    encoder: Encoder,
) -> None:
    made = generation(encoder, stops=(" stop",))
    before, stop, after = (ids(encoder, text) for text in ("hello", " stop", " more"))
    rows = Logprobs([*range(len(before + stop + after))])
    kept = made.on_tokens(0, before + stop + after, rows, None)
    assert kept == len(before + stop)
    (choice,) = (await taken(made)).choices
    assert (choice.text, choice.token_ids, choice.finish) == ("hello", before + stop, None)
    assert choice.logprobs is not None
    assert choice.logprobs.positions == [*range(kept)]
    made.on_tokens(0, [], None, Finished(FinishReason.STOP, usage=Usage(output_tokens=kept)))
    (end,) = (await taken(made)).choices
    assert end.finish is not None
    assert (end.finish.stop_string, end.text) == (" stop", "")
    assert await made.next() is None


async def test_an_engine_that_ended_by_itself_after_the_stop_string_changes_nothing(
    encoder: Encoder,
) -> None:
    made = generation(encoder, stops=("hel",))
    output = ids(encoder, "hello world")
    usage = Usage(output_tokens=len(output))
    assert made.on_tokens(0, output, None, Finished(FinishReason.LENGTH, usage=usage)) is None
    (choice,) = (await taken(made)).choices
    assert choice.finish is not None
    end = choice.finish.scheduler
    assert (end.reason, choice.finish.stop_string, choice.text) == (FinishReason.STOP, "hel", "")
    assert end.usage.output_tokens == len(choice.token_ids)
    assert end.usage.output_tokens + end.usage.wasted_tokens == len(output)


async def test_a_lost_session_ends_open_choices_with_an_error_but_not_a_stopped_one(
    encoder: Encoder,
) -> None:
    made = generation(encoder, n=2, stops=("hel",))
    made.on_tokens(0, ids(encoder, "hello"), None, None)
    made.on_tokens(1, ids(encoder, "other"), None, None)
    for index in (0, 1):
        made.on_lost(index, WorkerLost("gone"))
    stopped, lost = (await taken(made)).choices
    assert stopped.finish is not None
    assert stopped.finish.scheduler.reason is FinishReason.STOP
    assert lost.finish is not None
    assert isinstance(lost.finish.scheduler.error, WorkerLost)
    assert await made.next() is None


async def test_a_refusal_before_admission_is_raised(encoder: Encoder) -> None:
    made = generation(encoder, n=2)
    full = Finished(FinishReason.ERROR, error=Overloaded("full", retry_after_s=2))
    made.on_tokens(0, [], None, full)
    made.on_tokens(1, [], None, full)
    with pytest.raises(Overloaded):
        await made.next()


async def test_a_loss_before_admission_is_raised(encoder: Encoder) -> None:
    made = generation(encoder)
    made.on_lost(0, WorkerLost("gone"))
    with pytest.raises(WorkerLost):
        await made.next()


async def test_an_abort_after_the_deadline_is_the_deadlines_error(encoder: Encoder) -> None:
    made = generation(encoder)
    made.on_queued(0, Queued(0, 0))
    made.expire()
    made.on_tokens(0, [], None, Finished(FinishReason.ABORT))
    (choice,) = (await taken(made)).choices
    assert choice.finish is not None
    assert type(choice.finish.scheduler.error).__name__ == "DeadlineExceeded"


async def test_parts_of_the_prompts_logprobs_are_joined(encoder: Encoder) -> None:
    made = generation(encoder)
    made.on_prompt_logprobs(PromptLogprobs(1, [5], [-1.0], [1], [0], [], []))
    made.on_prompt_logprobs(PromptLogprobs(2, [6], [-2.0], [1], [1], [9], [-0.1]))
    joined = (await taken(made)).prompt_logprobs
    assert joined == PromptLogprobs(1, [5, 6], [-1.0, -2.0], [1, 1], [0, 1], [9], [-0.1])


@pytest.mark.parametrize("num_chars", [0, 3, 5])
async def test_a_resumed_choice_sends_only_the_characters_that_the_client_lacks(
    encoder: Encoder, num_chars: int
) -> None:
    made = generation(encoder, stops=("zzz",))
    given = ids(encoder, "hello")
    assert made.resume(0, given, num_chars=num_chars)
    made.on_tokens(0, ids(encoder, " world"), None, LENGTH)
    (choice,) = (await taken(made)).choices
    assert choice.text == "hello world"[num_chars:]
    assert (choice.num_tokens, choice.num_chars) == (len(given), num_chars)


async def test_a_resumed_stream_goes_on_inside_a_character(encoder: Encoder) -> None:
    made = generation(encoder)
    pepper = ids(encoder, "a🌶b")
    assert made.resume(0, pepper[:3], num_chars=1)
    made.on_tokens(0, pepper[3:], None, LENGTH)
    assert (await taken(made)).choices[0].text == "🌶b"


async def test_a_stop_string_across_the_resumption_is_found(encoder: Encoder) -> None:
    made = generation(encoder, stops=("lo wo",))
    assert made.resume(0, ids(encoder, "hello"), num_chars=3)
    assert made.on_tokens(0, ids(encoder, " world"), None, None) is not None
    assert (await taken(made)).choices[0].text == ""


async def test_a_resumed_choice_with_a_stop_string_in_it_ends_at_once(encoder: Encoder) -> None:
    made = generation(encoder, stops=("llo",))
    given = ids(encoder, "hello")
    assert not made.resume(0, given, num_chars=1)
    made.admit_finished()
    delta = await taken(made)
    (choice,) = delta.choices
    assert delta.prompt_ids == [7, 8]
    assert choice.text == "e"
    assert choice.finish is not None
    assert choice.finish.stop_string == "llo"
    assert choice.finish.scheduler.usage.output_tokens == len(given)
    assert await made.next() is None


async def test_a_client_that_claims_more_text_than_there_was_is_refused(encoder: Encoder) -> None:
    with pytest.raises(InvalidRequest):
        generation(encoder).resume(0, ids(encoder, "hi"), num_chars=3)
