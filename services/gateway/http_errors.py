"""The one place where an error becomes HTTP, for ours and the framework's.

Every route has OpenAI's envelope, but for those of Anthropic's API, which have its own.
"""

from __future__ import annotations

import math
import secrets

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import (
    InvalidRequest,
    InvariantError,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    SluicewayError,
    Unavailable,
    WorkerLost,
)
from services.common.telemetry import get_logger
from services.gateway.anthropic import errors as anthropic

DEFAULT_RETRY_AFTER_S = 1.0

log = get_logger(__name__)


def envelope(error: SluicewayError) -> bytes:
    """The error as OpenAI's JSON object."""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.openai_type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_headers(error: SluicewayError) -> dict[str, str]:
    """Headers that belong to an error: when to try again."""
    retry_after_s = error.retry_after_s
    if retry_after_s is None and isinstance(error, Overloaded | Unavailable | WorkerLost):
        retry_after_s = DEFAULT_RETRY_AFTER_S
    return {} if retry_after_s is None else {"retry-after": str(max(1, math.ceil(retry_after_s)))}


def error_response(
    error: SluicewayError, *, path: str, headers: dict[str, str] | None = None
) -> Response:
    """A whole reply that says what went wrong.

    Args:
        error: It.
        path: Of the request: the routes of Anthropic's API have its envelope.
        headers: Further ones.
    """
    is_anthropic = path == anthropic.PATH or path.startswith(anthropic.PATH + "/")
    return Response(
        orjson.dumps(anthropic.error_json(error)) if is_anthropic else envelope(error),
        status_code=error.http_status,
        headers=error_headers(error) | (headers or {}),
        media_type="application/json",
    )


def error_event(error: SluicewayError) -> bytes:
    """The error as the last line of an event stream; no [DONE] follows it."""
    return b"data: " + envelope(error) + b"\n\n"


def unexpected(error: BaseException) -> InvariantError:
    """Log a bug and give what the client may know of it."""
    debug_id = secrets.token_hex(6)
    log.error("unexpected_error", debug_id=debug_id, exc_info=error)
    return InvariantError(f"internal error; the log has it under debug id {debug_id}")


def install(app: FastAPI) -> None:
    """Have every error that is expected answered in the envelope of its route."""
    app.add_exception_handler(SluicewayError, _ours)
    app.add_exception_handler(HTTPException, _framework)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, SluicewayError)
    return error_response(error, path=request.url.path)


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = _of_status(error, request)
    return error_response(found, path=request.url.path, headers=dict(error.headers or {}))


def _of_status(error: HTTPException, request: Request) -> SluicewayError:
    route = f"{request.method} {request.url.path}"
    if error.status_code == NotFound.http_status:
        return NotFound(f"no such route: {route}; /docs lists them")
    if error.status_code == MethodNotAllowed.http_status:
        return MethodNotAllowed(f"this route does not take this method: {route}")
    return InvalidRequest(f"{route}: {error.detail}")


class Bugs:
    """ASGI middleware: what nobody expected is a 500 in the envelope of its route.

    Starlette would answer outside of every middleware, so without the headers that browsers and the
    client's log need.
    """

    def __init__(self, app: ASGIApp) -> None:
        """
        Args:
            app: What is behind it.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        has_started = False

        async def send_on(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:
            if has_started or scope["type"] != "http":
                raise  # the server logs it and hangs up
            reply = error_response(unexpected(error), path=scope["path"])
            await reply(scope, receive, send)
