"""From a JSON object to a validated request model, with OpenAI's way of naming what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from services.common.errors import InvalidRequest

MAX_SHOWN_VALUE = 60

# Type of pydantic's error → what a value must be; its context fills in the rest.
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "text",
    "union_tag_not_found": "an object with a known type",
}
# The same for what is not about the value but about whether it is there, and how much of it.
_RULES = {
    "missing": "is required",
    "string_too_short": "must not be empty",  # no field asks for more than one
    "too_long": "has {actual_length} entries; at most {max_length} are allowed",
    "too_short": "must not be empty",
}

M = TypeVar("M", bound=BaseModel)


def validate(body: dict[str, Any], model: type[M]) -> M:
    """Check the types of a request body.

    Raises:
        InvalidRequest: Names the field and its value.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _explain(error, body) from None


def _explain(error: ValidationError, body: dict[str, Any]) -> InvalidRequest:
    """The most telling of pydantic's complaints: those that lie deepest in the body.

    Several at one place are the alternatives of a field that may be one thing or another.
    """
    items = error.errors(include_url=False)
    paths = [_path(item["loc"], body, is_missing=item["type"] == "missing") for item in items]
    deepest = max(paths, key=len)
    param = _spell(deepest)
    alternatives = [item for item, path in zip(items, paths, strict=True) if path == deepest]
    return InvalidRequest(f"{param} {_complaint(alternatives)}", param=param)


def _complaint(alternatives: Sequence[ErrorDetails]) -> str:
    first = alternatives[0]
    if first["type"] in _RULES:
        return _filled(_RULES[first["type"]], first)
    wanted = [
        _filled(_WANTED[kind], one) for one in alternatives if (kind := one["type"]) in _WANTED
    ]
    wanted = list(dict.fromkeys(wanted))  # each once, in order
    said = f"must be {' or '.join(wanted)}" if wanted else f"is refused: {first['msg']}"
    return f"{said}, got {_shown(first['input'])}"


def _filled(words: str, item: ErrorDetails) -> str:
    return words.format(**item.get("ctx", {}))


def _path(loc: Sequence[str | int], body: Any, *, is_missing: bool) -> list[str | int]:
    """The part of pydantic's location that exists in the body; the rest names alternatives."""
    path: list[str | int] = []
    value = body
    for part in loc:
        if not _has(value, part):
            continue
        value = value[part]
        path.append(part)
    return [*path, loc[-1]] if is_missing else path


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _spell(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "..."
