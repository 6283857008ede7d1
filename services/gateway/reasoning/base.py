"""Parts a choice's text into the thought and the answer that follows it."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.text_reader import Steps, TextReader


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """How a model marks its thought.

    Attributes:
        opening: Stands before it; written as ``<...>``, as grammars write tokens.
        closing: Stands after it; likewise.
        is_opened_by_prompt: Whether the chat template has written ``opening`` already.
        models: Parts of names of models that think so, in lower case.
    """

    opening: str
    closing: str
    is_opened_by_prompt: bool
    models: tuple[str, ...] = ()


@dataclass(slots=True)
class Parted:
    """What a piece of text turned out to be."""

    thought: str = ""
    answer: str = ""


class ThoughtParser:
    """Reads the text of one choice: ``feed`` what comes, then ``end``.

    The marks are taken out, and white space after them. Text without ``opening`` at its start has
    no thought, unless the prompt has opened it.

    Attributes:
        num_tokens: Tokens of the thought so far, marks included. Where the thought ends inside an
            update of several tokens, they are shared out by their characters.
    """

    def __init__(self, marks: ThoughtFormat, *, is_open: bool) -> None:
        """
        Args:
            marks: The format.
            is_open: Whether the text begins inside the thought.
        """
        self.num_tokens = 0
        self._marks = marks
        self._is_open = is_open
        self._end: int | None = None  # characters up to the end of the thought, once it has ended
        self._num_chars_fed = 0
        self._num_tokens_fed = 0
        self._reader = TextReader()
        self._found = Parted()
        self._steps = self._read()
        next(self._steps, None)

    def feed(self, text: str, *, num_tokens: int) -> Parted:
        """What is certain once ``text``, of so many tokens, has come, too."""
        had_ended = self._end is not None
        self._reader.add(text)
        next(self._steps, None)
        self._num_chars_fed += len(text)
        self._num_tokens_fed += num_tokens
        if self._is_open:
            self.num_tokens = self._num_tokens_fed
        elif self._end is not None and not had_ended:
            self.num_tokens = self._num_tokens_until(self._end, len(text), num_tokens)
        return self._collect()

    def _num_tokens_until(self, end: int, num_chars: int, num_tokens: int) -> int:
        """Tokens fed up to character ``end``, which lies in the last ones."""
        num_after = num_tokens * (self._num_chars_fed - end) // num_chars
        return self._num_tokens_fed - num_after

    def end(self) -> Parted:
        """What was held back until the end."""
        self._reader.end()
        next(self._steps, None)
        return self._collect()

    def _collect(self) -> Parted:
        found, self._found = self._found, Parted()
        return found

    def _read(self) -> Steps[None]:
        space = yield from self._reader.skip_space()
        if (yield from self._reader.accept(self._marks.opening)):
            self._is_open = True
        if self._is_open:
            yield from self._read_thought()
        else:
            self._add_answer(space)
        yield from self._reader.rest(self._add_answer)

    def _read_thought(self) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._reader.until(self._marks.closing, self._add_thought)
        if (yield from self._reader.accept(self._marks.closing)):
            self._is_open = False
            self._end = self._reader.num_taken
            yield from self._reader.skip_space()

    def _add_thought(self, text: str) -> None:
        self._found.thought += text

    def _add_answer(self, text: str) -> None:
        self._found.answer += text
