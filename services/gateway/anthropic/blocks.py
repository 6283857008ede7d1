"""The content of a message: blocks that grow one after the other, and the events that tell so."""

from __future__ import annotations

import json
import secrets
from typing import Any

from services.gateway.sse import named_event
from services.gateway.tool_calls.base import CallPart

JsonObject = dict[str, Any]


class Blocks:
    """Text, thoughts and calls in the order in which they come.

    Attributes:
        has_called: Whether there is a call.
    """

    def __init__(self) -> None:
        self.has_called = False
        self._closed: list[JsonObject] = []
        self._open: JsonObject | None = None
        self._pieces: list[str] = []  # of the open block's text
        self._events: list[bytes] = []

    def say(self, text: str) -> None:
        """More of the answer's text."""
        self._require("text", {"text": ""})
        self._grow(text, "text_delta", "text")

    def think(self, text: str) -> None:
        """More of the thought."""
        self._require("thinking", {"thinking": "", "signature": ""})
        self._grow(text, "thinking_delta", "thinking")

    def call(self, part: CallPart) -> None:
        """A call begins, or goes on."""
        if part.name:
            self.has_called = True
            tool_use = {"id": f"toolu_{secrets.token_hex(12)}", "name": part.name, "input": {}}
            self.close()
            self._require("tool_use", tool_use)
        if part.arguments:
            self._grow(part.arguments, "input_json_delta", "partial_json")

    def close(self) -> None:
        """The open block, if any, is complete."""
        if self._open is None:
            return
        self._tell({"type": "content_block_stop", "index": len(self._closed)})
        self._closed.append(_complete(self._open, "".join(self._pieces)))
        self._open = None
        self._pieces.clear()

    def as_json(self) -> list[JsonObject]:
        """The complete blocks."""
        return self._closed

    def take_events(self) -> bytes:
        """What has happened since the last time."""
        taken, self._events = self._events, []
        return b"".join(taken)

    def _require(self, kind: str, empty: JsonObject) -> None:
        """Have a block of a kind open."""
        if self._open is not None and self._open["type"] == kind:
            return
        self.close()
        self._open = {"type": kind, **empty}
        index = len(self._closed)
        self._tell({"type": "content_block_start", "index": index, "content_block": self._open})

    def _grow(self, text: str, kind: str, field: str) -> None:
        self._pieces.append(text)
        index = len(self._closed)
        delta = {"type": kind, field: text}
        self._tell({"type": "content_block_delta", "index": index, "delta": delta})

    def _tell(self, data: JsonObject) -> None:
        self._events.append(named_event(data))


def _complete(block: JsonObject, text: str) -> JsonObject:
    if block["type"] == "tool_use":
        return block | {"input": _input(text)}
    return block | {block["type"]: text}


def _input(arguments: str) -> JsonObject:
    """The input of a call; that of one that was cut short is empty."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
