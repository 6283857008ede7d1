"""Stop strings: found where they end first, held back exactly, equal for any chunking."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.stop import StopSearch

texts = st.text(alphabet="abé\U0001f336", max_size=24)
stop_lists = st.lists(
    st.text(alphabet="abé\U0001f336", min_size=1, max_size=5), min_size=1, max_size=4
)


def reference(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop ends, by trying every end; ties go to the first in the list."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def chunks_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def found(pieces: list[str], stops: list[str]) -> tuple[int, str] | None:
    search = StopSearch(stops)
    before = 0
    for piece in pieces:
        hit = search.feed(piece)
        if hit is not None:
            return before + hit.end, hit.stop
        before += len(piece)
    return None


@given(texts, stop_lists, st.lists(st.integers(0, 100), max_size=8))
def test_any_chunking_finds_the_stop_that_ends_first(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    assert found(chunks_of(text, cuts), stops) == reference(text, stops)


@given(texts, stop_lists)
def test_held_back_is_exactly_the_longest_tail_that_begins_a_stop(
    text: str, stops: list[str]
) -> None:
    search = StopSearch(stops)
    if search.feed(text) is not None:
        return
    tails = [stop[:n] for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    assert search.num_held == max(map(len, tails), default=0)
    assert search.num_held <= max(map(len, stops)) - 1


def test_of_two_stops_that_end_together_the_first_in_the_list_wins() -> None:
    assert found(["hello"], ["lo", "hello"]) == (5, "lo")
    assert found(["hello"], ["hello", "lo"]) == (5, "hello")


def test_of_two_stops_in_one_piece_the_one_completed_first_wins() -> None:
    assert found(["xab"], ["b", "a"]) == (2, "a")
