"""Which requests of a step a padding backend computes together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_GROUP_SCORES = 1 << 22
"""Scores (rows * queries * keys) of one group: bounds its mask to 16 MiB in float32."""

_SMALL_QUERY = 16
_SMALL_CONTEXT = 256


def group_rows(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[list[int]]:
    """Put requests of similar shape together.

    Requests of a group are padded to its longest query and its longest context. Lengths within a
    power of two go together, so padding at most doubles either; single-token queries (decode) stay
    among themselves, and short ones are not split further.

    Args:
        query_lens: New tokens of each request; requests with none are left out.
        seq_lens: Context of each request, new tokens included.

    Returns:
        Indices of the requests, group by group, ascending within a group.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len:
            by_shape.setdefault(_shape_class(query_len, seq_len), []).append(row)
    return [
        group
        for (query_class, context_class), rows in by_shape.items()
        for group in _chunks(rows, max(1, MAX_GROUP_SCORES // (query_class * context_class)))
    ]


def _shape_class(query_len: int, seq_len: int) -> tuple[int, int]:
    context_class = max(_SMALL_CONTEXT, _next_power_of_two(seq_len))
    if query_len == 1:
        return 1, context_class
    return max(_SMALL_QUERY, _next_power_of_two(query_len)), context_class


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _chunks(rows: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
