"""When sampling parameters are valid, and the keys of draws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.convert import (
    constraint_from_message,
    constraint_to_message,
    sampling_from_message,
    sampling_to_message,
)
from services.common.errors import InvalidRequest
from services.common.sampling import (
    BadWord,
    Constraint,
    ConstraintKind,
    RepetitionDetection,
    SamplingParams,
    draw_key,
    mix64,
)

TOKEN_ID = st.integers(0, 2**32 - 1)
IDS = st.lists(TOKEN_ID, max_size=3).map(tuple)
BAD_WORD = st.builds(BadWord, IDS, IDS, IDS)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PARAMS = st.builds(
    SamplingParams,
    temperature=FINITE,
    top_p=FINITE,
    top_k=st.integers(-1, 2**31 - 1),
    min_p=FINITE,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(TOKEN_ID, max_size=3).map(tuple),
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    repetition_penalty=FINITE,
    logit_bias=st.dictionaries(TOKEN_ID, FINITE, max_size=3),
    allowed_token_ids=st.none() | st.lists(TOKEN_ID, max_size=3).map(tuple),
    bad_words=st.lists(BAD_WORD, max_size=3).map(tuple),
    logprobs=st.none() | st.integers(-1, 20),
    prompt_logprobs=st.none() | st.integers(-1, 20),
    repetition_detection=st.none()
    | st.builds(RepetitionDetection, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)


@given(PARAMS)
def test_sampling_parameters_round_trip_over_the_wire(params: SamplingParams) -> None:
    assert sampling_from_message(sampling_to_message(params)) == params


@pytest.mark.parametrize("kind", ConstraintKind)
def test_constraints_round_trip_over_the_wire(kind: ConstraintKind) -> None:
    constraint = Constraint(kind, "spec")
    assert constraint_from_message(constraint_to_message(constraint)) == constraint


def test_the_defaults_are_valid() -> None:
    SamplingParams().validate()


BAD = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "1"),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", "5"),
    ("max_tokens", 5.0),
    ("min_tokens", -1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("logprobs", 21),
    ("prompt_logprobs", -2),
    ("seed", 2**63),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: float("nan")}),
    ("allowed_token_ids", ()),
    ("stop_token_ids", tuple(range(129))),
    ("repetition_detection", RepetitionDetection(1, 2, 2)),
    ("bad_words", (BadWord((), (), ()),)),
    ("bad_words", (BadWord((0,), (5, 6), (1,)),)),
    ("bad_words", (BadWord((1,), (5,), (1,)),)),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        replace(SamplingParams(), **{field: value}).validate()  # type: ignore[arg-type]
    assert caught.value.param == field


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2).validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", (10,)),
        ("allowed_token_ids", (10,)),
        ("bad_words", (BadWord.of_tokens(1, 10),)),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(field: str, value: object) -> None:
    params = replace(SamplingParams(), **{field: value})  # type: ignore[arg-type]
    params.validate_token_ids(11)
    with pytest.raises(InvalidRequest) as caught:
        params.validate_token_ids(10)
    assert caught.value.param == field


def test_draw_keys_differ_in_each_of_their_four_values() -> None:
    keys = {
        draw_key(seed, choice=choice, position=position, stream=stream)
        for seed in (-1, 0, 1)
        for choice in range(3)
        for position in range(50)
        for stream in range(2)
    }
    assert len(keys) == 3 * 3 * 50 * 2


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_mix64_is_injective(a: int, b: int) -> None:
    assert (mix64(a) == mix64(b)) == (a == b)
