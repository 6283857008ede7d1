"""Qwen3's calls: JSON as in ``hermes.py``, or the XML of Qwen3-Coder.

``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``. XML values have no
types of their own: they get those of the function's schema.
"""

from __future__ import annotations

import re
from typing import Any

from services.gateway.text_reader import Steps, TextReader
from services.gateway.tool_calls.base import CallFormat, Findings, JsonObject, parse_json
from services.gateway.tool_calls.hermes import CLOSING, OPENING, read_object

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read(reader: TextReader, found: Findings) -> Steps[None]:
    while (yield from reader.until(OPENING, found.text, give_begun=found.cut_mark)):
        yield from reader.accept(OPENING)
        before = OPENING + (yield from reader.skip_space())
        if (yield from reader.peek()) == "{":
            yield from read_object(reader, found, before=before)
        elif (yield from reader.accept(_FUNCTION)):
            yield from _read_function(reader, found, before=before + _FUNCTION)
        elif reader.is_cut(_FUNCTION):
            found.cut_call(before + reader.take(len(_FUNCTION)))
        else:
            found.text(before)


def _read_function(reader: TextReader, found: Findings, *, before: str) -> Steps[None]:
    parts: list[str] = []
    yield from reader.until(_FUNCTION_END, parts.append)
    raw = "".join(parts)
    is_closed = yield from reader.accept(_FUNCTION_END)
    name, _, body = raw.partition(">")
    name = name.strip()
    if not is_closed or not found.call(name, _arguments(body, found.tools.get(name, {}))):
        if is_closed:
            found.text(before + raw + _FUNCTION_END)
        else:
            found.cut_call(before + raw)
        return
    yield from reader.skip_space()
    yield from reader.skip(CLOSING)


def _arguments(body: str, schema: JsonObject) -> JsonObject:
    declared = schema.get("properties")
    types = declared if isinstance(declared, dict) else {}
    return {
        name.strip(): _typed(value, types.get(name.strip()))
        for name, value in _PARAMETER.findall(body)
    }


def _typed(value: str, schema: Any) -> Any:
    """A text is taken as it stands; anything else is read as JSON, if it is JSON."""
    is_text = isinstance(schema, dict) and schema.get("type") == "string"
    parsed = None if is_text else parse_json(value)
    return value if parsed is None and (is_text or value.strip() != "null") else parsed


FORMAT = CallFormat(_read, models=("qwen3",))
