"""Searches the text of one choice for stop strings, one piece after the other.

Each stop string is matched by an automaton that reads one character at a time (Knuth, Morris and
Pratt 1977), so the answer cannot depend on how the text was cut into pieces, and the number of
characters that may yet turn out to belong to a stop is known exactly: those, and no more, are held
back. Knows nothing of tokens: ``text_output.py`` decides which text is searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string that has been completed.

    Attributes:
        stop: The string.
        end: Where it ends in the piece that was fed: the index after its last character.
    """

    stop: str
    end: int


class StopSearch:
    """Finds the stop string that is completed first; of several, the first in the list."""

    __slots__ = ("_fallbacks", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Args:
            stops: Not empty, none of them "".
        """
        self._stops = tuple(stops)
        self._fallbacks = [_fallback_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def num_held(self) -> int:
        """Characters at the end of what was fed that may be the beginning of a stop string."""
        return max(self._matched)

    def feed(self, piece: str) -> StopHit | None:
        """Read on.

        Args:
            piece: Text that follows what was fed before.

        Returns:
            The stop string that ends first in ``piece``, if any; nothing may be fed after that.
        """
        for position, char in enumerate(piece):
            for index, stop in enumerate(self._stops):
                if self._advance(index, stop, char) == len(stop):
                    return StopHit(stop, position + 1)
        return None

    def _advance(self, index: int, stop: str, char: str) -> int:
        matched = self._matched[index]
        fallback = self._fallbacks[index]
        while matched and stop[matched] != char:
            matched = fallback[matched - 1]
        if stop[matched] == char:
            matched += 1
        self._matched[index] = matched
        return matched


def _fallback_table(stop: str) -> list[int]:
    """``table[i]``: length of the longest proper prefix of ``stop[: i + 1]`` that is its suffix."""
    table = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[matched] != stop[i]:
            matched = table[matched - 1]
        if stop[matched] == stop[i]:
            matched += 1
        table[i] = matched
    return table
