"""Request ids: ours, unique; the client's X-Request-Id is echoed and logged, never trusted."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.telemetry import bind_request

HEADER = "x-request-id"
_ALLOWED = re.compile(r"[\x21-\x7e]{1,256}")


def new_request_id(prefix: str) -> str:
    """A unique id: ``prefix`` ("chatcmpl") and 96 random bits."""
    return f"{prefix}-{secrets.token_hex(12)}"


class RequestIds:
    """ASGI middleware: binds the client's request id to the log and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        """
        Args:
            app: What is behind it.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ALLOWED.fullmatch(given) else new_request_id("req")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        with bind_request(http_request_id=request_id):
            await self._app(scope, receive, send_with_id)
