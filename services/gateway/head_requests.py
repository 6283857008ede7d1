"""HEAD: what GET would answer, without its body. Load balancers ask so whether we are healthy."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware: a HEAD is answered as a GET; the server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        """
        Args:
            app: What is behind it.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = dict(scope) | {"method": "GET"}  # the server goes by its own
        await self._app(scope, receive, send)
