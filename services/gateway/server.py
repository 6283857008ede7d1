"""The gateway's process: uvicorn on our own event loop, the tokenizers' links, drain."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from services.common.errors import ConfigError
from services.common.lifecycle import Lifecycle, freeze_garbage
from services.common.telemetry import get_logger
from services.gateway.admission import Admission
from services.gateway.app import Gateway, build_app
from services.gateway.auth import ApiKeys
from services.gateway.config import GatewayConfig
from services.gateway.exchange import ExchangeContext
from services.gateway.fleet import Fleet, Pulse
from services.gateway.http_protocol import KEEP_ALIVE_S, HttpProtocol
from services.gateway.key_limits import KeyLimits
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.fields import UnknownFields
from services.gateway.openai.plan import Limits, PlanContext
from services.gateway.openai.responses.store import ResponseStore
from services.gateway.parsers import Parsers
from services.gateway.response_jobs import ResponseJobs
from services.gateway.response_routes import ResponseRoutes
from services.gateway.sse import SendBodyPast
from services.gateway.tokenizer_client import TokenizerClient

BACKLOG = 2048
LAST_BYTES_S = 5
"""How long uvicorn waits for replies to be taken after the drain."""

log = get_logger(__name__)


async def serve(config: GatewayConfig, life: Lifecycle) -> None:
    """Serve until asked to stop, then drain.

    Args:
        config: Settings.
        life: Says when to stop.

    Raises:
        ConfigError: The port is taken, or a key is malformed.
    """
    async with asyncio.TaskGroup() as group:
        server = GatewayServer(config)
        address = await server.start(group)
        freeze_garbage()
        log.info("listening", address=address)
        await life.stopping.wait()
        await server.stop()


class GatewayServer:
    """One gateway: ``start``, then ``stop``.

    Attributes:
        drain_timeout_s: How long ``stop`` lets the requests inside finish.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """
        Args:
            config: Settings.

        Raises:
            ConfigError: A key is malformed, or there are limits per key and no keys.
        """
        self._pulse = Pulse()
        fleet = Fleet(clock=lambda: self._pulse.seconds)
        self.drain_timeout_s = config.drain_timeout_s
        self._config = config
        self._client = TokenizerClient(
            config.tokenizers, fleet=fleet, cluster_token=config.cluster_token
        )
        self._admission = Admission(config.max_in_flight)
        store = ResponseStore(
            max_responses=config.max_stored_responses,
            max_bytes=config.max_stored_response_bytes,
            ttl_s=config.stored_response_ttl_s,
            clock=time.monotonic,
        )
        self._jobs = ResponseJobs(store, self._admission)
        app = assemble(
            config,
            fleet=fleet,
            client=self._client,
            admission=self._admission,
            store=store,
            jobs=self._jobs,
        )
        self._server = _Server(app)

    async def start(self, group: asyncio.TaskGroup) -> str:
        """Link up with the tokenizers and take connections.

        Args:
            group: Owns what runs until ``stop``.

        Returns:
            "host:port" with the real port.

        Raises:
            ConfigError: The port is taken.
        """
        listener = _listen(self._config.host, self._config.port)
        self._background = [
            group.create_task(self._client.run()),
            group.create_task(self._pulse.run()),
            group.create_task(self._jobs.run()),
        ]
        self._serving = group.create_task(self._server.serve(sockets=[listener]))
        await self._server.listening.wait()
        host, port = listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Take no more requests, let those inside end, and hang up."""
        if self._server.should_exit:
            return
        await self._admission.drain(self.drain_timeout_s)
        self._server.should_exit = True
        await self._serving
        for task in self._background:
            task.cancel()


def assemble(
    config: GatewayConfig,
    *,
    fleet: Fleet,
    client: TokenizerClient,
    admission: Admission,
    store: ResponseStore,
    jobs: ResponseJobs,
) -> FastAPI:
    """The application of a config.

    Args:
        config: Settings.
        fleet: What ``client`` keeps up to date.
        client: Link to the tokenizers.
        admission: The door.
        store: Responses that are kept.
        jobs: Responses that are made in the background.
    """
    metrics = GatewayMetrics(fleet, admission, store)
    planning = PlanContext(
        fleet=fleet,
        limits=Limits(
            max_n=config.max_n,
            max_choices=config.max_choices,
            trust_request_chat_template=config.trust_request_chat_template,
        ),
        unknown_fields=UnknownFields(),
        # Without a cluster token there is one gateway: a secret of its own does.
        namespace_secret=(config.cluster_token or secrets.token_hex(16)).encode(),
        parsers=Parsers(tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser),
    )
    exchange = ExchangeContext(
        client=client,
        admission=admission,
        key_limits=_key_limits(config),
        metrics=metrics,
        max_body_bytes=config.max_body_bytes,
    )
    gateway = Gateway(
        fleet=fleet,
        admission=admission,
        metrics=metrics,
        planning=planning,
        exchange=exchange,
        responses=ResponseRoutes(planning=planning, exchange=exchange, store=store, jobs=jobs),
        started_at=int(time.time()),
    )
    return build_app(gateway, keys=ApiKeys(config.api_key), allowed_origins=config.allowed_origins)


def _key_limits(config: GatewayConfig) -> KeyLimits:
    max_in_flight = config.max_in_flight_per_key
    max_tokens_per_minute = config.max_tokens_per_minute_per_key
    has_limits = max_in_flight is not None or max_tokens_per_minute is not None
    if has_limits and not config.api_key:
        raise ConfigError("limits per API key need keys: set api_key")
    return KeyLimits(
        max_in_flight=max_in_flight,
        max_tokens_per_minute=max_tokens_per_minute,
        clock=time.monotonic,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling; ``listening`` is set once connections are taken."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                SendBodyPast(app),
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_BYTES_S,
            )
        )
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``common/lifecycle.py``."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets=sockets)
        self.listening.set()
