"""CORS as starlette has it, with refusals in OpenAI's envelope."""

from __future__ import annotations

from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from services.common.errors import InvalidRequest
from services.gateway.http_errors import error_response


class Cors(CORSMiddleware):
    """Answers browsers that ask whether they may call."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """What a browser asks before it sends a request."""
        reply = super().preflight_response(request_headers)
        if reply.status_code == 200:
            return reply
        headers = {
            name: value
            for name, value in reply.headers.items()
            if name not in ("content-length", "content-type")
        }
        error = InvalidRequest(bytes(reply.body).decode())
        return error_response(error, path="", headers=headers)
