"""The text of a choice: stop strings over token boundaries, hold-back, min_tokens, any chunking."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.text_output import TextOutput


class Letters:
    """A detokenizer whose tokens are the strings of a list."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def step(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        return ""


def output(
    texts: list[str], stops: list[str], *, include_stop: bool = False, min_tokens: int = 0
) -> TextOutput:
    return TextOutput(Letters(texts), stops=stops, include_stop=include_stop, min_tokens=min_tokens)


def run(made: TextOutput, chunks: list[list[int]]) -> tuple[str, str | None, int]:
    """Text, stop string, and number of tokens used."""
    text, used = "", 0
    for chunk in chunks:
        released = made.feed(chunk)
        text += released.text
        used += released.num_tokens
        if released.stop is not None:
            return text, released.stop, used
    return text + made.finish(), None, used


token_texts = st.lists(st.text(alphabet="abc", max_size=3), min_size=1, max_size=12)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(token_texts, stop_lists, st.lists(st.integers(0, 99)), st.booleans(), st.integers(0, 4))
def test_any_chunking_gives_the_same_text_stop_and_number_of_tokens(
    texts: list[str], stops: list[str], cuts: list[int], include_stop: bool, min_tokens: int
) -> None:
    def made() -> TextOutput:
        return output(texts, stops, include_stop=include_stop, min_tokens=min_tokens)

    ids = list(range(len(texts)))
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    chunks = [ids[a:b] for a, b in pairwise(edges)]
    assert run(made(), chunks) == run(made(), [[i] for i in ids]) == run(made(), [ids])


@given(token_texts, stop_lists)
def test_no_character_of_a_stop_string_is_ever_released(texts: list[str], stops: list[str]) -> None:
    made = output(texts, stops)
    shown = ""
    for token_id in range(len(texts)):
        released = made.feed([token_id])
        shown += released.text
        if released.stop is not None:
            break
    assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize(("include_stop", "text"), [(False, "Hell"), (True, "HelloHel")])
def test_a_stop_over_a_token_boundary_is_cut_before_or_after_it(
    include_stop: bool, text: str
) -> None:
    made = output(["Hello"], ["oHel"], include_stop=include_stop)
    assert run(made, [[0], [0], [0]]) == (text, "oHel", 2)


def test_what_might_become_a_stop_is_held_and_given_out_when_it_does_not() -> None:
    made = output(["x\n", "\nUs", "e me"], ["\n\nUser:"])
    assert [made.feed([i]).text for i in range(3)] == ["x", "", "\n\nUse me"]


def test_nothing_is_held_for_a_stop_that_is_shown() -> None:
    made = output(["x\n"], ["\n\n"], include_stop=True)
    assert made.feed([0]).text == "x\n"


def test_held_text_comes_out_at_the_end() -> None:
    made = output(["DEFG"], ["FGH"])
    assert made.feed([0]).text == "DE"
    assert made.finish() == "FG"


def test_the_text_of_the_first_min_tokens_is_neither_searched_nor_held() -> None:
    made = output(["Hello"], ["Hello"], min_tokens=3)
    assert run(made, [[0] * 8]) == ("HelloHelloHello", "Hello", 4)


def test_a_stop_does_not_reach_back_into_the_first_min_tokens() -> None:
    made = output(["ab", "c", "abc"], ["abc"], min_tokens=1)
    assert run(made, [[0], [1], [2]]) == ("abc", "abc", 3)


def test_tokens_after_the_stop_are_not_looked_at() -> None:
    made = output(["a", "STOP", "never"], ["STOP"])
    assert run(made, [[0, 1, 2]]) == ("a", "STOP", 2)
