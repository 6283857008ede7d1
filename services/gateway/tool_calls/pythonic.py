"""The whole answer is a list of Python calls: ``[f(x=1), g()]``, of Llama 3.2 and 4 and others."""

from __future__ import annotations

import ast
from typing import Any

from services.gateway.text_reader import Steps, TextReader
from services.gateway.tool_calls.base import CallFormat, Findings, JsonObject

_JSON_NAMES = {"true": True, "false": False, "null": None}


def _read(reader: TextReader, found: Findings) -> Steps[None]:
    raw = [(yield from reader.skip_space())]
    if (yield from reader.peek()) == "[":
        yield from reader.bracketed(raw.append, quotes="\"'")
        if _tell("".join(raw).strip(), found):
            raw = []
    found.text("".join(raw))
    yield from reader.rest(found.text)


def _tell(source: str, found: Findings) -> bool:
    """Whether it is a list of calls of functions that are offered; then they are told."""
    try:
        calls = _calls(source)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # ast.parse raises any of them
        return False
    return bool(calls) and found.all_calls(calls)


def _calls(source: str) -> list[tuple[object, object]]:
    """
    Raises:
        ValueError: It is something else.
        SyntaxError: It is no Python at all.
    """
    body = ast.parse(source, mode="eval").body
    if not isinstance(body, ast.List):
        raise ValueError("not a list")
    return [_call(node) for node in body.elts]


def _call(node: ast.expr) -> tuple[str, JsonObject]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        arguments[keyword.arg] = _value(keyword.value)
    return ast.unparse(node.func), arguments


def _value(node: ast.expr) -> Any:
    """A literal; JSON's names for true, false and null are understood."""
    match node:
        case ast.Name() if node.id in _JSON_NAMES:
            return _JSON_NAMES[node.id]
        case ast.List() | ast.Tuple():
            return [_value(item) for item in node.elts]
        case ast.Dict():
            keys = [_value(key) for key in node.keys if key is not None]
            if not all(isinstance(key, str) for key in keys):
                raise ValueError("keys must be texts")
            return dict(zip(keys, map(_value, node.values), strict=True))
        case _:
            return _scalar(node)


def _scalar(node: ast.expr) -> str | int | float | bool | None:
    value = ast.literal_eval(node)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and value - value == 0:  # finite
        return value
    raise ValueError("not a value of JSON")


FORMAT = CallFormat(_read, models=("llama-4", "llama4"))
