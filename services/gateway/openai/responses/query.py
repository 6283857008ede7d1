"""Parameters of query strings."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.errors import InvalidRequest


def int_of(query: Mapping[str, str], name: str, *, low: int, high: int) -> int | None:
    """A number of a query string; ``None`` = not given.

    Raises:
        InvalidRequest: No number, or out of bounds.
    """
    text = query.get(name)
    if text is None:
        return None
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} must be a whole number in [{low}, {high}], got {text[:40]!r}", param=name
        )
    return value


def bool_of(query: Mapping[str, str], name: str) -> bool:
    """A switch of a query string; not given = off.

    Raises:
        InvalidRequest: Neither true nor false.
    """
    text = query.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false, got {text[:40]!r}", param=name)
    return text == "true"
