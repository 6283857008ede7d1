"""Errors as Anthropic's clients read them."""

from __future__ import annotations

from typing import Any

from services.common.errors import SluicewayError
from services.gateway.sse import named_event

PATH = "/v1/messages"
"""What is at or below it speaks Anthropic's language."""

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_json(error: SluicewayError) -> dict[str, Any]:
    """The error as Anthropic's JSON object; it has no place for the field but the message."""
    named = error.param is None or error.param in error.message
    message = error.message if named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": _type_of(error), "message": message}}


def _type_of(error: SluicewayError) -> str:
    found = _TYPES.get(error.http_status)
    return found or ("invalid_request_error" if error.http_status < 500 else "api_error")


def error_event(error: SluicewayError) -> bytes:
    """The error as the last event of a stream."""
    return named_event(error_json(error))
