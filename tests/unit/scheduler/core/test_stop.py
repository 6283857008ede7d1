"""When a request ends with its last token."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling import RepetitionDetection, SamplingParams
from services.scheduler.core.output import FinishReason
from services.scheduler.core.request import Request
from services.scheduler.core.stop import Stop, find_stop, replay_stops, set_stop_rules

EOS = 2


def _stop(
    output: Sequence[int],
    sampling: SamplingParams,
    *,
    max_total_tokens: int = 1000,
    grammar_ref: int = 0,
) -> Stop | None:
    request = Request(
        handle=1,
        request_id="r",
        prompt_ids=[9, 9],
        resume_ids=output,
        sampling=sampling,
        root_key=b"",
        arrival_s=0.0,
        grammar_ref=grammar_ref,
    )
    set_stop_rules(request, eos_token_ids=(EOS,), max_total_tokens=max_total_tokens)
    stop = find_stop(request)
    assert stop is None or request.may_have_ended
    return stop


def test_end_of_sequence_stops_without_naming_a_token() -> None:
    assert _stop([5, EOS], SamplingParams()) == Stop(FinishReason.STOP)


def test_ignore_eos_goes_on_but_the_same_id_as_a_stop_id_stops_and_is_named() -> None:
    assert _stop([5, EOS], SamplingParams(ignore_eos=True)) is None
    named = SamplingParams(ignore_eos=True, stop_token_ids=(EOS,))
    assert _stop([5, EOS], named) == Stop(FinishReason.STOP, token_id=EOS)


def test_a_stop_id_stops_and_is_named() -> None:
    assert _stop([5], SamplingParams(stop_token_ids=(5,))) == Stop(FinishReason.STOP, token_id=5)


def test_nothing_stops_before_min_tokens() -> None:
    sampling = SamplingParams(min_tokens=3, stop_token_ids=(5,))
    assert _stop([5, EOS], sampling) is None
    assert _stop([5, 5, EOS], sampling) == Stop(FinishReason.STOP)


def test_the_end_of_a_grammars_text_stops_whatever_min_tokens_and_ignore_eos_say() -> None:
    sampling = SamplingParams(min_tokens=3, ignore_eos=True)
    assert _stop([5, EOS], sampling) is None
    assert _stop([5, EOS], sampling, grammar_ref=1) == Stop(FinishReason.STOP)
    assert _stop([5, 6], sampling, grammar_ref=1) is None


def test_max_tokens_and_a_full_context_end_with_length() -> None:
    assert _stop([5, 6], SamplingParams(), max_total_tokens=4) == Stop(FinishReason.LENGTH)
    assert _stop([5], SamplingParams(), max_total_tokens=4) is None


def test_a_full_context_ends_even_before_min_tokens() -> None:
    sampling = SamplingParams(min_tokens=50)
    assert _stop([5, EOS], sampling, max_total_tokens=4) == Stop(FinishReason.LENGTH)


def test_end_of_sequence_at_the_last_possible_token_is_a_stop() -> None:
    assert _stop([5, EOS], SamplingParams(), max_total_tokens=4) == Stop(FinishReason.STOP)


def test_a_repeated_pattern_stops_once_it_has_been_seen_min_count_times() -> None:
    sampling = SamplingParams(
        repetition_detection=RepetitionDetection(
            max_pattern_size=3, min_pattern_size=2, min_count=3
        )
    )
    assert _stop([7, 5, 6, 5, 6, 5], sampling) is None
    found = _stop([7, 5, 6, 5, 6, 5, 6], sampling)
    assert found == Stop(FinishReason.STOP, detail="repetition_detected")
    assert _stop([5, 5, 5], sampling) is None, "a pattern of one is below the minimum"
    assert _stop([5] * 6, sampling) is not None


def test_the_prompt_does_not_count_as_a_repetition() -> None:
    rule = RepetitionDetection(max_pattern_size=1, min_pattern_size=1, min_count=3)
    assert _stop([9], SamplingParams(repetition_detection=rule)) is None
    assert _stop([9, 9, 9], SamplingParams(repetition_detection=rule)) is not None


@settings(deadline=None)
@given(
    output=st.lists(st.integers(5, 7), min_size=1, max_size=16),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    min_count=st.integers(2, 4),
)
def test_repetition_is_found_exactly_where_the_definition_says(
    output: list[int], sizes: tuple[int, int], min_count: int
) -> None:
    low, high = min(sizes), max(sizes)
    rule = RepetitionDetection(max_pattern_size=high, min_pattern_size=low, min_count=min_count)
    expected = any(
        len(output) >= size * min_count
        and output[-size * min_count :] == output[-size:] * min_count
        for size in range(low, high + 1)
    )
    assert (_stop(output, SamplingParams(repetition_detection=rule)) is not None) == expected


def test_resumed_output_is_checked_token_by_token_and_cut_after_its_end() -> None:
    request = Request(
        handle=1,
        request_id="r",
        prompt_ids=[9],
        resume_ids=[5, EOS, 6],
        sampling=SamplingParams(),
        root_key=b"",
        arrival_s=0.0,
    )
    set_stop_rules(request, eos_token_ids=(EOS,), max_total_tokens=100)
    assert replay_stops(request) == Stop(FinishReason.STOP)
    assert request.output_ids == [5, EOS]
