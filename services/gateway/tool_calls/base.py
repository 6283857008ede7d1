"""What formats of tool calls share: what they find, and how a choice's text goes through one.

A format says how a model writes calls into its text. What reads like a call and is none (broken
JSON, a function that the request does not offer) stays text. So does a call in which the text ends,
unless whole calls came before it: then the reply has those, and nothing of the cut one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.text_reader import Steps, TextReader

JsonObject = dict[str, Any]
Tools = Mapping[str, JsonObject]
"""Functions that may be called: name → JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call.

    Attributes:
        index: Which call of the choice.
        name: Of the function, on the first part of a call; later ones have "".
        arguments: More of the arguments' JSON.
    """

    index: int
    name: str
    arguments: str


Part = str | CallPart


@dataclass(slots=True)
class Parsed:
    """What a piece of text turned out to be: text and pieces of calls, in their order."""

    parts: list[Part] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallPart]:
        """All of the pieces of calls."""
        return [part for part in self.parts if isinstance(part, CallPart)]


class Findings:
    """Takes what a format finds.

    White space around calls is dropped: it belongs to the format, not to the answer.
    """

    def __init__(self, tools: Tools) -> None:
        """
        Args:
            tools: What may be called.
        """
        self.tools = tools
        self._names: list[object] = list(tools)  # no set: what reads like a name may be anything
        self._num_calls = 0
        self._space = ""
        self._is_after_call = False
        self._found: list[Part] = []

    def collect(self, *, is_end: bool) -> Parsed:
        """What was found since the last time."""
        if is_end and not self._num_calls and self._space:
            self._found.append(self._space)
        found, self._found = self._found, []
        return Parsed(found)

    def text(self, text: str) -> None:
        """Text that is no call."""
        text = self._space + text
        if self._is_after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._is_after_call = False
            self._found.append(shown)

    def cut_call(self, text: str) -> None:
        """The beginning of a call in which the text ends; nothing of it is shown beside calls."""
        if not self._num_calls:
            self.text(text)

    def cut_mark(self, text: str) -> None:
        """The beginning of a mark in which the text ends; it may be text, but not behind a call."""
        if not self._is_after_call:
            self.text(text)

    def begin_call(self, name: str) -> None:
        """A call of a function that is offered; its arguments follow."""
        self._add(CallPart(self._num_calls, name, ""))
        self._num_calls += 1
        self._space = ""
        self._is_after_call = True

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that was begun last."""
        if text:
            self._add(CallPart(self._num_calls - 1, "", text))

    def _add(self, part: CallPart) -> None:
        """Keep a part, as one with what was found of the same call just before."""
        last = self._found[-1] if self._found else ""
        if isinstance(last, CallPart) and last.index == part.index:
            self._found.pop()
            part = CallPart(part.index, last.name, last.arguments + part.arguments)
        self._found.append(part)

    def call(self, name: object, arguments: object) -> bool:
        """A whole call; ``False`` if it is none."""
        return self.all_calls([(name, arguments)])

    def all_calls(self, calls: Sequence[tuple[object, object]]) -> bool:
        """Several calls (name, arguments), all or none; ``False`` if one of them is none."""
        written = [(name, _written(arguments)) for name, arguments in calls]
        if any(name not in self._names or arguments is None for name, arguments in written):
            return False
        for name, arguments in written:
            self.begin_call(str(name))
            self.arguments(str(arguments))
        return True

    def json_call(self, raw: str) -> bool:
        """A call as a JSON object with ``name`` and ``arguments``; ``False`` if it is none."""
        call = parse_json(raw)
        if not isinstance(call, dict):
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        return self.call(call.get("name"), arguments)


def parse_json(raw: str) -> Any:
    """A JSON value; ``None`` if it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _written(arguments: object) -> str | None:
    """Arguments as JSON; ``None`` if they are no JSON object. Some models write text of JSON."""
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return written


ReadCalls = Callable[[TextReader, Findings], Steps[None]]


@dataclass(frozen=True, slots=True)
class CallFrame:
    """What stands around a call that is a JSON object of ``name`` and ``arguments``."""

    before: str
    after: str
    between: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    Attributes:
        read: Reads a choice's text to its end.
        models: Parts of names of models that write so, in lower case.
        has_special_tokens: Whether its marks are special tokens, which must stay in the text.
        frame: For a grammar of calls, where there can be one: JSON between marks that are text.
    """

    read: ReadCalls
    models: tuple[str, ...] = ()
    has_special_tokens: bool = False
    frame: CallFrame | None = None


class CallParser:
    """Reads the text of one choice: ``feed`` what comes, then ``end``."""

    def __init__(self, read: ReadCalls, tools: Tools, *, is_parallel: bool = True) -> None:
        """
        Args:
            read: The format.
            tools: What may be called.
            is_parallel: Whether more than the first call is wanted.
        """
        self._is_parallel = is_parallel
        self._reader = TextReader()
        self._findings = Findings(tools)
        self._steps = read(self._reader, self._findings)
        next(self._steps, None)

    def feed(self, text: str) -> Parsed:
        """What is certain once ``text`` has come, too."""
        self._reader.add(text)
        next(self._steps, None)
        return self._collect(is_end=False)

    def end(self) -> Parsed:
        """What was held back until the end."""
        self._reader.end()
        next(self._steps, None)
        return self._collect(is_end=True)

    def _collect(self, *, is_end: bool) -> Parsed:
        parsed = self._findings.collect(is_end=is_end)
        if not self._is_parallel:
            parsed.parts = [
                part for part in parsed.parts if isinstance(part, str) or part.index == 0
            ]
        return parsed
