"""What is refused at the edge, with the field's name; room behind the prompt."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from services.common.sampling import Constraint, ConstraintKind, SamplingParams
from services.tokenizer.prompt import TextPrompt
from services.tokenizer.request import (
    GenerateRequest,
    Resume,
    ResumedChoice,
    require_valid,
    truncate,
    with_room,
)

GOOD = GenerateRequest("r", 0, "tiny", TextPrompt("hi"), SamplingParams())


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 200}, "stop"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": ("x" * 65,)}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature"),
        ({"sampling": SamplingParams(stop_token_ids=(100,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias={100: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(allowed_token_ids=(100,))}, "allowed_token_ids"),
        ({"constraint": Constraint(ConstraintKind.REGEX, "(")}, "constraint"),
        ({"resume": Resume([1], [ResumedChoice(1, [], 0)])}, "resume"),
        ({"resume": Resume([1], [ResumedChoice(0, [], 0)] * 2)}, "resume"),
        ({"pools": True, "n": 2}, "n"),
        ({"pools": True, "stop": ("x",)}, "stop"),
        ({"pools": True, "constraint": Constraint(ConstraintKind.REGEX, "a")}, "constraint"),
        ({"pools": True, "sampling": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"pools": True, "resume": Resume([1], [])}, "resume"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        require_valid(replace(GOOD, **changes), vocab_size=100, max_choices=8)
    assert raised.value.param == param


def test_a_deadline_that_has_passed_is_said_at_once() -> None:
    with pytest.raises(DeadlineExceeded):
        require_valid(replace(GOOD, deadline_s=0.0), vocab_size=100, max_choices=8)


def test_without_max_tokens_the_rest_of_the_context_is_taken() -> None:
    sampling = with_room(SamplingParams(), num_prompt_tokens=40, max_model_len=100, param="prompt")
    assert sampling.max_tokens == 60


@pytest.mark.parametrize(
    ("num_prompt_tokens", "sampling", "param", "numbers"),
    [
        (7, SamplingParams(max_tokens=98), "max_tokens", {100, 7, 98, 105}),
        (100, SamplingParams(), "messages", {100}),
        (120, SamplingParams(max_tokens=1), "messages", {100, 120}),
        (90, SamplingParams(min_tokens=11), "min_tokens", {100, 90, 11}),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    num_prompt_tokens: int, sampling: SamplingParams, param: str, numbers: set[int]
) -> None:
    with pytest.raises(ContextLengthExceeded) as raised:
        with_room(
            sampling,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=100,
            param="messages",
        )
    assert raised.value.param == param
    assert numbers <= {int(number) for number in re.findall(r"\d+", raised.value.message)}


def test_a_prompt_that_just_fits_is_taken() -> None:
    with_room(SamplingParams(max_tokens=1), num_prompt_tokens=99, max_model_len=100, param="prompt")


@pytest.mark.parametrize(
    ("keep", "num_output_tokens", "kept"),
    [(None, 1, 200), (3, 1, 3), (500, 1, 200), (-1, 1, 99), (-1, 10, 90), (-1, 0, 100)],
)
def test_truncation_keeps_the_last_tokens(
    keep: int | None, num_output_tokens: int, kept: int
) -> None:
    ids = list(range(200))
    found = truncate(ids, keep=keep, num_output_tokens=num_output_tokens, max_model_len=100)
    assert found == ids[200 - kept :]
