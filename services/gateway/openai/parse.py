"""From a JSON object to a validated request model, with OpenAI's way of naming what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.common.errors import InvalidRequest

MAX_SHOWN_VALUE = 60

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
    """The most telling of pydantic's complaints: the one that lies deepest in the body."""
    items = error.errors(include_url=False, include_context=False)
    paths = [_path(item["loc"], body, is_missing=item["type"] == "missing") for item in items]
    item, path = max(zip(items, paths, strict=True), key=lambda pair: len(pair[1]))
    param = _spell(path)
    message = item["msg"][:1].lower() + item["msg"][1:]
    got = "" if item["type"] == "missing" else f", got {_shown(item.get('input'))}"
    return InvalidRequest(f"{param}: {message}{got}", param=param)


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
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "..."
