"""Which requests are padded together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.attention._row_groups import MAX_GROUP_SCORES, group_rows

SHAPES = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(0, 3000)), st.integers(0, 9000)), max_size=80
)


@given(SHAPES)
def test_every_request_with_tokens_is_in_exactly_one_group(shapes: list[tuple[int, int]]) -> None:
    query_lens, seq_lens = _lens(shapes)
    rows = [row for group in group_rows(query_lens, seq_lens) for row in group]
    assert sorted(rows) == [row for row, query_len in enumerate(query_lens) if query_len]


@given(SHAPES)
def test_padding_at_most_doubles_what_is_not_small(shapes: list[tuple[int, int]]) -> None:
    query_lens, seq_lens = _lens(shapes)
    for group in group_rows(query_lens, seq_lens):
        queries = [query_lens[row] for row in group]
        contexts = [seq_lens[row] for row in group]
        assert max(queries) <= max(16, 2 * min(queries))
        assert max(contexts) <= max(256, 2 * min(contexts))


@given(SHAPES)
def test_decodes_stay_among_themselves(shapes: list[tuple[int, int]]) -> None:
    query_lens, seq_lens = _lens(shapes)
    for group in group_rows(query_lens, seq_lens):
        assert len({query_lens[row] == 1 for row in group}) == 1


@given(SHAPES)
def test_a_group_of_several_never_exceeds_the_score_limit(shapes: list[tuple[int, int]]) -> None:
    query_lens, seq_lens = _lens(shapes)
    for group in group_rows(query_lens, seq_lens):
        num_queries = max(query_lens[row] for row in group)
        num_keys = max(seq_lens[row] for row in group)
        assert len(group) == 1 or len(group) * num_queries * num_keys <= MAX_GROUP_SCORES


def test_many_like_decodes_are_one_group() -> None:
    assert group_rows([1] * 64, list(range(100, 164))) == [list(range(64))]


def _lens(shapes: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    query_lens = [query_len for query_len, _ in shapes]
    return query_lens, [query_len + context for query_len, context in shapes]
