"""Server-sent events: headers once, then bytes that are events already.

The hot path: no models, no copies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx kind would hold the events back.
    (b"x-accel-buffering", b"no"),
]


def named_event(data: dict[str, Any]) -> bytes:
    """One server-sent event, named as its data is typed."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))


class EventStream:
    """One streamed reply: ``start``, at the latest with the first event, ``write``, ``end``."""

    def __init__(self, send: Send, *, send_body: Send | None = None) -> None:
        """
        Args:
            send: ASGI; it waits while the client does not read.
            send_body: The server's own ``send``, past every middleware; ``None`` = as ``send``.
        """
        self.send = send
        self._send_body = send_body or send
        self.has_started = False

    async def start(self) -> None:
        """Send status 200 and the headers."""
        await self.send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self.has_started = True

    async def write(self, events: bytes) -> None:
        """Send whole events (``data: ...`` and a blank line); nothing if there are none."""
        if events:
            if not self.has_started:
                await self.start()
            await self._send_body({"type": "http.response.body", "body": events, "more_body": True})

    async def copy(self, events: AsyncIterator[bytes]) -> None:
        """Send all events there are, from the headers to the end."""
        await self.start()
        async for some in events:
            await self.write(some)
        await self.end(b"")

    async def end(self, last: bytes) -> None:
        """Send the last event and close the reply."""
        if not self.has_started:
            await self.start()
        await self._send_body({"type": "http.response.body", "body": last, "more_body": False})


SEND_BODY = "sluiceway.send_body"


class SendBodyPast:
    """ASGI, around an application: keeps the server's own ``send`` for streamed bodies.

    Every middleware wraps ``send``, and none of ours looks at a body: a tenth of what a streamed
    token costs here would go into passing it on.
    """

    def __init__(self, app: ASGIApp) -> None:
        """
        Args:
            app: The application with its middleware.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        scope[SEND_BODY] = send
        await self._app(scope, receive, send)
