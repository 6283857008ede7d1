"""Which formats a model's answers are read with: those that were set, or those its name tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from services.common.plugins import load_plugin, plugin_names
from services.gateway.reasoning.base import ThoughtFormat
from services.gateway.tool_calls.base import CallFormat

AUTO = "auto"
NONE = "none"


class _Format(Protocol):
    @property
    def models(self) -> tuple[str, ...]:
        """Parts of names of models, in lower case."""


F = TypeVar("F", bound=_Format)


class Parsers:
    """The formats of tool calls and thoughts of each model."""

    def __init__(self, *, tool_calls: str = AUTO, reasoning: str = AUTO) -> None:
        """
        Args:
            tool_calls: Name of a format in ``tool_calls/``; "auto" = by the model's name; "none".
            reasoning: Likewise, in ``reasoning/``.

        Raises:
            ConfigError: No such format.
        """
        self._calls: Sequence[CallFormat] = [
            load_plugin("services.gateway.tool_calls", name, what="tool call parser").FORMAT
            for name in _names("services.gateway.tool_calls", tool_calls)
        ]
        self._thoughts: Sequence[ThoughtFormat] = [
            load_plugin("services.gateway.reasoning", name, what="reasoning parser").FORMAT
            for name in _names("services.gateway.reasoning", reasoning)
        ]
        self._guesses_calls = tool_calls == AUTO
        self._guesses_thoughts = reasoning == AUTO

    def call_format(self, model: str) -> CallFormat | None:
        """How a model writes calls; ``None`` = not known."""
        return _chosen(self._calls, model, guesses=self._guesses_calls)

    def thought_format(self, model: str) -> ThoughtFormat | None:
        """How a model marks its thought; ``None`` = not known."""
        return _chosen(self._thoughts, model, guesses=self._guesses_thoughts)


def _names(package: str, wanted: str) -> list[str]:
    if wanted == AUTO:
        return plugin_names(package)
    return [] if wanted == NONE else [wanted]


def _chosen(formats: Sequence[F], model: str, *, guesses: bool) -> F | None:
    """The one that was set; or the one with the longest part of the model's name."""
    if not guesses:
        return formats[0] if formats else None
    name = model.lower()
    matches = [(len(part), one) for one in formats for part in one.models if part in name]
    return max(matches, key=lambda match: match[0])[1] if matches else None
