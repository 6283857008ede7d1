"""Asks one service whether it lives: the health check of containers.

``python -m services.probe grpc://127.0.0.1:50051`` or ``... http://127.0.0.1:8000/live``; exit
status 0 means yes. With gRPC, ``grpc://host:port/ready`` asks for readiness instead of liveness.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 2.0


def is_serving(url: str) -> bool:
    """Whether the service behind ``url`` answers that it serves."""
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        return _grpc_is_serving(parts.netloc, service=parts.path.strip("/"))
    return _http_is_ok(url)


def _grpc_is_serving(address: str, *, service: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _http_is_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
