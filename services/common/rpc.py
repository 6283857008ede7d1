"""gRPC as every service uses it: servers, channels, the cluster token, errors, request ids.

A servicer raises the errors of ``common/errors.py``; the server's interceptor makes a rich status
of them, and ``translate`` makes the same error of it on the client's side.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from services.common.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvariantError,
    SluicewayError,
    Unauthenticated,
    Unavailable,
    error_from_name,
)
from services.common.telemetry import bind_task, bound_field, get_logger

PROTOCOL = 1
"""Version of the messages; a peer may be one older."""

MAX_MESSAGE_BYTES = 64 << 20
TOKEN_KEY = "x-sluiceway-token"
REQUEST_ID_KEY = "x-request-id"
READY = "ready"
PROGRESS = "progress"

_SHARED_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 10_000),
]
_SERVER_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # A server that was held up sees the pings of half a minute at once: that is no attack.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]
_CLIENT_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    # A new channel connects at once, and does not share how an older one to that address fared.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: how long one attempt to connect may take. A busy machine needs seconds.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

log = get_logger(__name__)
Register = Callable[[Any, grpc.aio.Server], None]
Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]


class RpcServer:
    """A grpc.aio server with health, reflection, the cluster token and error translation.

    Call ``add`` for each servicer, then ``start``; ``stop`` ends it.
    """

    def __init__(self, *, host: str, port: int, cluster_token: str | None) -> None:
        """
        Args:
            host: Address to listen on.
            port: 0 = any free one.
            cluster_token: What every call must carry; ``None`` = no check, loopback only.

        Raises:
            ConfigError: ``host`` is not loopback and there is no token.
        """
        require_token_beyond_loopback(host, cluster_token)
        self._host = host
        self._port = port
        self._server = grpc.aio.server(
            interceptors=[_ServerInterceptor(cluster_token)], options=_SERVER_OPTIONS
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]

    def add(self, register: Register, servicer: object, service_name: str) -> None:
        """Serve a servicer.

        Args:
            register: The generated ``add_XServicer_to_server``.
            servicer: Its implementation.
            service_name: Full name, for reflection ("sluiceway.v1.Worker").
        """
        register(servicer, self._server)
        self._names.append(service_name)

    async def start(self) -> str:
        """Listen; liveness becomes SERVING, ``ready`` and ``progress`` stay as they were set.

        Returns:
            "host:port" with the real port.

        Raises:
            ConfigError: The port is taken.
        """
        reflection.enable_server_reflection(self._names, self._server)
        try:
            port = self._server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port} (port taken?): choose another --port; "
                "under `sluiceway serve`, start that again, which looks for a free one"
            ) from error
        await self._server.start()
        await self._set("", True)
        return f"{self._host}:{port}"

    async def set_ready(self, is_ready: bool) -> None:
        """Say whether a request would succeed here."""
        await self._set(READY, is_ready)

    async def set_progress(self, is_progressing: bool) -> None:
        """Say whether steps advance while there is work."""
        await self._set(PROGRESS, is_progressing)

    async def _set(self, name: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def connect(address: str, *, cluster_token: str | None) -> grpc.aio.Channel:
    """A channel whose calls carry the cluster token and the bound request id.

    Args:
        address: "host:port".
        cluster_token: ``None`` = none.

    Returns:
        A channel to make stubs of; close it with ``await channel.close()``.
    """
    channel = grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
    return cast(grpc.aio.Channel, _TokenChannel(channel, cluster_token))


def translate(error: grpc.aio.AioRpcError) -> SluicewayError:
    """The error that the peer raised, or the one that a broken call amounts to."""
    status = rpc_status.from_call(cast(grpc.Call, error))
    if status is not None:
        info, retry_after_s = _details_of(status)
        if info is not None:
            return error_from_name(
                info.reason,
                status.message,
                param=info.metadata.get("param") or None,
                retry_after_s=retry_after_s,
            )
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(text or "the call was cancelled")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(text or "the call took too long")
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(text or "the peer cannot be reached")
    return InvariantError(f"{code.name}: {text}")


class Endpoints:
    """A list of addresses that may grow and shrink while it is watched.

    An entry is "host:port", taken as it is, or "dns:///name:port", resolved to every address of the
    name again and again.
    """

    def __init__(self, addresses: Sequence[str], *, refresh_s: float = 10.0) -> None:
        self._addresses = tuple(addresses)
        self._refresh_s = refresh_s

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """Yield the set of "host:port" at once and then on every change.

        A name that cannot be resolved counts as no address; it is asked again.
        """
        last: frozenset[str] | None = None
        while True:
            current = await self.resolve()
            if current != last:
                yield current
                last = current
            await asyncio.sleep(self._refresh_s)

    async def resolve(self) -> frozenset[str]:
        """The addresses now."""
        found: set[str] = set()
        for address in self._addresses:
            if address.startswith("dns:///"):
                found |= await _resolve_name(address.removeprefix("dns:///"))
            else:
                found.add(address)
        return frozenset(found)


def require_token_beyond_loopback(host: str, cluster_token: str | None) -> None:
    """Refuse to listen where others may reach us without a secret.

    Raises:
        ConfigError: ``host`` is not loopback and there is no token.
    """
    if cluster_token or is_loopback(host):
        return
    raise ConfigError(
        f"refusing to listen on {host} without a cluster token: set --cluster-token "
        "(the same on every service) or listen on 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _resolve_name(name_and_port: str) -> set[str]:
    name, _, port = name_and_port.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("name_not_resolved", name=name, error=str(error))
        return set()
    hosts = {str(entry[4][0]) for entry in found}
    return {f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts}


class _TokenChannel:
    """Adds metadata to every call; unlike interceptors it costs streams nothing per message."""

    def __init__(self, channel: grpc.aio.Channel, cluster_token: str | None) -> None:
        self._channel = channel
        self._fixed = ((TOKEN_KEY, cluster_token),) if cluster_token else ()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return attribute

        def make(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            return self._with_metadata(attribute(*args, **kwargs))

        return make

    def _with_metadata(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def invoke(*args: Any, metadata: Sequence[tuple[str, str]] = (), **kwargs: Any) -> Any:
            request_id = bound_field("request_id")
            bound = ((REQUEST_ID_KEY, request_id),) if request_id else ()
            return call(*args, metadata=(*self._fixed, *bound, *metadata), **kwargs)

        return invoke


class _ServerInterceptor(grpc.aio.ServerInterceptor):
    """Checks the token, binds the request id and turns our errors into statuses."""

    def __init__(self, cluster_token: str | None) -> None:
        self._token = cluster_token

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = cast(Any, await continuation(handler_call_details))
        if handler is None or handler_call_details.method.startswith("/grpc.health."):
            return cast("grpc.RpcMethodHandler[Any, Any]", handler)
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return cast(
            "grpc.RpcMethodHandler[Any, Any]",
            make(
                wrap(getattr(handler, kind)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            ),
        )

    def _wrap_unary(self, behaviour: Handler) -> Handler:
        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._admit(context)
            try:
                return await behaviour(request, context)
            except Exception as error:
                await _abort(context, error)

        return handle

    def _wrap_stream(self, behaviour: Handler) -> Handler:
        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._admit(context)
            try:
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:
                await _abort(context, error)

        return handle

    async def _admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Check the token; the task, which is this call's own, logs with its request id."""
        metadata = {str(k): v for k, v in context.invocation_metadata() or ()}
        given = metadata.get(TOKEN_KEY, "")
        if self._token and not hmac.compare_digest(str(given).encode(), self._token.encode()):
            await _abort(
                context,
                Unauthenticated("wrong or missing cluster token: give all services the same one"),
            )
        request_id = metadata.get(REQUEST_ID_KEY)
        if request_id:
            bind_task(request_id=str(request_id))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, SluicewayError):
        error = _report_bug(error)
    await context.abort_with_status(rpc_status.to_status(_status_of(error)))


def _report_bug(error: Exception) -> InvariantError:
    debug_id = secrets.token_hex(6)
    log.error("unexpected_error", debug_id=debug_id, exc_info=error)
    return InvariantError(f"internal error; the log has it under debug id {debug_id}")


def _status_of(error: SluicewayError) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain="sluiceway")
    if error.param:
        info.metadata["param"] = error.param
    details = [_packed(info)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    code = cast(int, getattr(code_pb2, error.grpc_status))
    return status_pb2.Status(code=code, message=error.message, details=details)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _details_of(
    status: status_pb2.Status,
) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    info: error_details_pb2.ErrorInfo | None = None
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return info, retry_after_s
