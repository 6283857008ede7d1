"""The whole answer is JSON: ``{"name": "f", "parameters": {"x": 1}}``, of Llama 3.1 to 3.3.

Several calls stand one after the other, or between semicolons; ``<|python_tag|>`` may open them.
"""

from __future__ import annotations

from services.gateway.text_reader import Steps, TextReader
from services.gateway.tool_calls.base import CallFormat, Findings

_TAG = "<|python_tag|>"


def _read(reader: TextReader, found: Findings) -> Steps[None]:
    before = yield from reader.skip_space()
    if (yield from reader.accept(_TAG)):
        before += _TAG + (yield from reader.skip_space())
    while (yield from reader.peek()) == "{":
        parts: list[str] = []
        is_whole = yield from reader.bracketed(parts.append)
        raw = "".join(parts)
        if not found.json_call(raw):
            if not is_whole:
                found.cut_call(before + raw)
                return
            before += raw
            break
        before = ""
        yield from reader.skip_space()
        yield from reader.accept(";")
        yield from reader.skip_space()
    found.text(before)
    yield from reader.rest(found.text)


FORMAT = CallFormat(
    _read,
    models=("llama-3.1", "llama-3.2", "llama-3.3", "llama3.1", "llama3.2", "llama3.3"),
    has_special_tokens=True,
)
