"""The text of a chat's choice as content, thought and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.reasoning.base import Parted, ThoughtParser
from services.gateway.tool_calls.base import CallParser, CallPart, Parsed


@dataclass(slots=True)
class AnswerDelta:
    """What a choice has gained."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)

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
        parted = self._part(text, num_tokens=num_tokens, is_end=is_end)
        parsed = self._find_calls(parted.answer, is_end=is_end)
        return AnswerDelta(parsed.text, parted.thought, parsed.calls)

    def _part(self, text: str, *, num_tokens: int, is_end: bool) -> Parted:
        if self._thoughts is None:
            return Parted(answer=text)
        parted = self._thoughts.feed(text, num_tokens=num_tokens)
        if is_end:
            last = self._thoughts.end()
            parted = Parted(parted.thought + last.thought, parted.answer + last.answer)
        return parted

    def _find_calls(self, text: str, *, is_end: bool) -> Parsed:
        if self._calls is None:
            return Parsed(text)
        parsed = self._calls.feed(text)
        if is_end:
            last = self._calls.end()
            parsed = Parsed(parsed.text + last.text, parsed.calls + last.calls)
        return parsed
