"""Mistral's calls: ``[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]``.

Or, from their eleventh tokenizer on, ``[TOOL_CALLS]f[ARGS]{"x": 1}`` for each call, also without
``[ARGS]`` and with ``[CALL_ID]...`` before it.
"""

from __future__ import annotations

from services.gateway.text_reader import Steps, TextReader
from services.gateway.tool_calls.base import CallFormat, Findings, parse_json

_MARK = "[TOOL_CALLS]"


def _read(reader: TextReader, found: Findings) -> Steps[None]:
    while (yield from reader.until(_MARK, found.text, give_begun=found.cut_mark)):
        yield from reader.accept(_MARK)
        before = _MARK + (yield from reader.skip_space())
        if (yield from reader.peek()) == "[":
            yield from _read_list(reader, found, before=before)
        else:
            yield from _read_named(reader, found, before=before)


def _read_list(reader: TextReader, found: Findings, *, before: str) -> Steps[None]:
    """Read a list of calls, each of which is told once it is closed."""
    before += reader.take(1) + (yield from reader.skip_space())
    while (yield from reader.peek()) == "{":
        parts: list[str] = []
        is_whole = yield from reader.bracketed(parts.append)
        if not found.json_call("".join(parts)):
            give = found.text if is_whole else found.cut_call
            give(before + "".join(parts))
            return
        before = ""
        yield from reader.skip_space()
        yield from reader.accept(",")
        yield from reader.skip_space()
    if not (yield from reader.peek()):
        found.cut_call(before)
    elif before:
        found.text(before)
    else:
        yield from reader.accept("]")


def _read_named(reader: TextReader, found: Findings, *, before: str) -> Steps[None]:
    head: list[str] = []
    arguments: list[str] = []
    is_whole = (yield from reader.until("{", head.append)) and (
        yield from reader.bracketed(arguments.append)
    )
    name = "".join(head).partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
    if not found.call(name, parse_json("".join(arguments))):
        give = found.text if is_whole else found.cut_call
        give(before + "".join(head + arguments))


FORMAT = CallFormat(_read, models=("mistral", "mixtral", "ministral"), has_special_tokens=True)
