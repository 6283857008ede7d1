"""Reads a request body: bounded in bytes and in depth, strict JSON, an object."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive

from services.common.errors import InvalidRequest, TooLarge
from services.gateway.disconnect import ClientGone

MAX_DEPTH = 128
BODY_WITHIN_S = 60.0
DISCARD_FACTOR = 4
"""A body too large is still read, and thrown away, up to so many times the limit: a client that is
cut off while it sends never sees the reply."""

BodyContent = dict[str, Any]

_NOT_A_NUMBER = re.compile(r"NaN|Infinity")


async def read_body(receive: Receive, *, headers: Headers, max_bytes: int) -> bytes:
    """The whole body.

    Args:
        receive: ASGI.
        headers: Of the request.
        max_bytes: Largest body that is taken.

    Raises:
        TooLarge: It has more bytes.
        InvalidRequest: It is not declared to be JSON in the clear, or does not come.
        ClientGone: The client left before it was complete.
    """
    _require_json(headers)
    _require_size(headers, max_bytes)
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            return await _read_all(receive, max_bytes)
    except TimeoutError:
        raise InvalidRequest(f"the body did not come within {BODY_WITHIN_S:g} s") from None


async def _read_all(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        if not message.get("more_body", False) or size > max_bytes * DISCARD_FACTOR:
            break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body has more than the {max_bytes} bytes that are allowed")


def _require_json(headers: Headers) -> None:
    """A web page may send other types to any address without asking; JSON it may not."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest(f"send the body as Content-Type: application/json, not {kind[:80]!r}")
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise InvalidRequest(f"send the body without Content-Encoding, not as {coding[:80]!r}")


def _require_size(headers: Headers, max_bytes: int) -> None:
    """What says that it is far too large is not waited for."""
    size = headers.get("content-length", "")
    if size.isdecimal() and int(size) > max_bytes * DISCARD_FACTOR:
        raise _too_large(max_bytes)


def parse_object(raw: bytes) -> BodyContent:
    """Parse a JSON object.

    Raises:
        InvalidRequest: Not JSON (invalid UTF-8, lone surrogates and NaN are not), not an object, or
            too deep.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        hint = "; JSON has no NaN or Infinity" if _NOT_A_NUMBER.match(error.doc, error.pos) else ""
        raise InvalidRequest(f"the body is not valid JSON: {error}{hint}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deeper_than(body, MAX_DEPTH):
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} levels deep")
    return body


def _is_deeper_than(value: object, limit: int) -> bool:
    """Level by level, so that depth costs no recursion."""
    level: list[Iterable[object]] = [_children(value)]
    for _ in range(limit):
        level = [
            _children(child)
            for children in level
            for child in children
            if type(child) is list or type(child) is dict
        ]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
