"""Reads text that comes in pieces, without caring where it was cut.

A format is a function over a ``TextReader``, written as if the whole text were there. Where it has
to wait for more it yields (``Steps``); what it finds is the same however the text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that yields whenever it needs more text."""

Give = Callable[[str], object]
"""Takes text, piece by piece."""


class TextReader:
    """The text that has come and was not read yet.

    Attributes:
        num_taken: Characters that were read.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._text = ""
        self._is_ended = False

    def add(self, text: str) -> None:
        """More text has come."""
        self._text += text

    def end(self) -> None:
        """No more will come."""
        self._is_ended = True

    def take(self, size: int) -> str:
        """Read ``size`` characters that have come."""
        taken, self._text = self._text[:size], self._text[size:]
        self.num_taken += len(taken)
        return taken

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while not self._text and not self._is_ended:
            yield
        return self._text[:1]

    def accept(self, mark: str) -> Steps[bool]:
        """Read ``mark`` if it comes next."""
        while len(self._text) < len(mark) and mark.startswith(self._text) and not self._is_ended:
            yield
        if not self._text.startswith(mark):
            return False
        self.take(len(mark))
        return True

    def is_cut(self, mark: str) -> bool:
        """Whether the text has ended and only the beginning of ``mark``, or nothing, is left."""
        return self._is_ended and mark.startswith(self._text)

    def skip(self, mark: str) -> Steps[None]:
        """Read ``mark`` if it comes next, or its beginning if the text ends in it."""
        if not (yield from self.accept(mark)) and self.is_cut(mark):
            self.take(len(mark))

    def skip_space(self) -> Steps[str]:
        """Read white space, and return it."""
        skipped = ""
        while (yield from self.peek()).isspace():
            skipped += self.take(len(self._text) - len(self._text.lstrip()))
        return skipped

    def until(self, mark: str, give: Give, *, give_begun: Give | None = None) -> Steps[bool]:
        """Read up to ``mark``, which is left to be read; all of it if ``mark`` does not come.

        Args:
            mark: Not empty.
            give: Gets the text before it, as soon as it cannot be part of the mark.
            give_begun: Gets the beginning of a mark that the text ends in; ``None`` = ``give``.

        Returns:
            Whether ``mark`` comes next.
        """
        while (found := self._text.find(mark)) < 0:
            give(self.take(len(self._text) - _overlap(self._text, mark)))
            if self._is_ended:
                (give_begun or give)(self.take(len(self._text)))
                return False
            yield
        give(self.take(found))
        return True

    def bracketed(self, give: Give, *, quotes: str = '"') -> Steps[bool]:
        """Read the value that begins with the bracket that comes next, up to its closing one.

        Args:
            give: Gets its text as it comes.
            quotes: Characters that open and close a string, in which brackets mean nothing.

        Returns:
            Whether it was closed before the text ended.
        """
        brackets = _Brackets(quotes)
        while (end := brackets.end_in(self._text)) < 0:
            give(self.take(len(self._text)))
            if self._is_ended:
                return False
            yield
        give(self.take(end))
        return True

    def rest(self, give: Give) -> Steps[None]:
        """Read all that comes."""
        while True:
            give(self.take(len(self._text)))
            if self._is_ended:
                return
            yield


def _overlap(text: str, mark: str) -> int:
    """How many last characters of ``text`` may be the beginning of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


class _Brackets:
    """Counts brackets outside of strings."""

    def __init__(self, quotes: str) -> None:
        self._quotes = quotes
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def end_in(self, text: str) -> int:
        """Where the value ends: the index after its closing bracket; -1 = not in ``text``."""
        for index, char in enumerate(text):
            if self._quote:
                self._in_string(char)
            elif char in self._quotes:
                self._quote = char
            elif char in "{[(":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return -1

    def _in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""
