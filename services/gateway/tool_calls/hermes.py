"""JSON between marks: ``<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>``.

Of Hermes 2 and 3, Qwen2.5 and others. Models that forget the closing mark are understood.
"""

from __future__ import annotations

from services.gateway.text_reader import Steps, TextReader
from services.gateway.tool_calls.base import CallFormat, CallFrame, Findings

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


def _read(reader: TextReader, found: Findings) -> Steps[None]:
    while (yield from reader.until(OPENING, found.text, give_begun=found.cut_mark)):
        yield from reader.accept(OPENING)
        before = OPENING + (yield from reader.skip_space())
        first = yield from reader.peek()
        if first == "{":
            yield from read_object(reader, found, before=before)
        else:
            give = found.text if first else found.cut_call
            give(before)


def read_object(reader: TextReader, found: Findings, *, before: str) -> Steps[None]:
    """Read a call whose "{" comes next, and its closing mark.

    Args:
        reader: The text.
        found: Gets the call.
        before: What was read of it already, should it turn out to be text.
    """
    parts: list[str] = []
    is_whole = yield from reader.bracketed(parts.append)
    raw = "".join(parts)
    if not found.json_call(raw):
        give = found.text if is_whole else found.cut_call
        give(before + raw)
        return
    yield from reader.skip_space()
    yield from reader.skip(CLOSING)


FORMAT = CallFormat(
    _read,
    models=("hermes", "hermes-3-llama", "hermes-2-pro-llama", "qwen2.5", "qwq"),
    frame=CallFrame(f"{OPENING}\n", f"\n{CLOSING}", "\n"),
)
