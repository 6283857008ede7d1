"""The text of a chat's choice as content, thought and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.reasoning.base import Parted, ThoughtParser
from services.gateway.tool_calls.base import CallParser, CallPart, Parsed, Part


@dataclass(slots=True)
class AnswerDelta:
    """What a choice has gained; the thought stands before the rest.

    Attributes:
        parts: Content and pieces of calls in their order; empty where there are no calls.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerParser:
    """Reads one choice: the thought comes first, calls are looked for in what follows it."""

    def __init__(self, thoughts: ThoughtParser | None, calls: CallParser | None) -> None:
        """
        Args:
            thoughts: ``None`` = the text has none.
            calls: ``None`` = likewise.
        """
        self._thoughts = thoughts
        self._calls = calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thought so far."""
        return self._thoughts.num_tokens if self._thoughts else 0

    def feed(self, text: str, *, num_tokens: int, is_end: bool) -> AnswerDelta:
        """What is certain once ``text``, of so many tokens, has come; all of it at the end."""
        if self._thoughts is None and self._calls is None:  # most answers; every token comes here
            return AnswerDelta(text)
        parted = self._part(text, num_tokens=num_tokens, is_end=is_end)
        if self._calls is None:
            return AnswerDelta(parted.answer, parted.thought)
        parsed = _find_calls(self._calls, parted.answer, is_end=is_end)
        calls = parsed.calls
        return AnswerDelta(parsed.text, parted.thought, calls, parsed.parts if calls else [])

    def _part(self, text: str, *, num_tokens: int, is_end: bool) -> Parted:
        if self._thoughts is None:
            return Parted(answer=text)
        parted = self._thoughts.feed(text, num_tokens=num_tokens)
        if is_end:
            last = self._thoughts.end()
            parted = Parted(parted.thought + last.thought, parted.answer + last.answer)
        return parted


def _find_calls(calls: CallParser, text: str, *, is_end: bool) -> Parsed:
    parsed = calls.feed(text)
    return Parsed(parsed.parts + calls.end().parts) if is_end else parsed
