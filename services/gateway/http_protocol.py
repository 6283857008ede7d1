"""HTTP/1.1 on a connection: uvicorn's, with bounds on the head of a request, and our errors."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.errors import InvalidRequest
from services.gateway.http_errors import envelope

KEEP_ALIVE_S = 75
HEAD_WITHIN_S = 60.0
MAX_HEAD_BYTES = 1 << 20
"""More than any one read, which may hold the body of the request before."""


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    Who sends nothing, or a head without end, is hung up on: no key has been asked for yet.
    """

    _is_in_head = False
    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; it may stay silent as long as between two requests."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._leave_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of requests."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "Request Header Fields Too Large", "the headers are too large")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self._leave_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that cannot be parsed, and hang up."""
        self._refuse(400, "Bad Request", msg)

    def _head_is_late(self) -> None:
        message = f"the headers did not come within {HEAD_WITHIN_S:g} s"
        self._refuse(408, "Request Timeout", message)

    def _refuse(self, status: int, reason: str, message: str) -> None:
        self._leave_head()
        if self.transport.is_closing():
            return
        body = envelope(InvalidRequest(message))
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _leave_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
