"""The client's W3C trace context."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from services.gateway.generation import Trace

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
MAX_TRACESTATE_CHARS = 512


def trace_of(headers: Headers) -> Trace | None:
    """The trace context that came with a request; one that is not well formed counts as none."""
    traceparent = headers.get("traceparent", "")
    if not _TRACEPARENT.fullmatch(traceparent):
        return None
    return Trace(traceparent, headers.get("tracestate", "")[:MAX_TRACESTATE_CHARS])
