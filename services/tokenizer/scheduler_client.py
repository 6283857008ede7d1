"""A Session to each scheduler, made again whenever it breaks.

Knows which addresses there are, not which of them a request should go to (``routing.py``).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc

from services.common.errors import WorkerLost
from services.common.pb import scheduler_pb2_grpc
from services.common.rpc import Endpoints, connect, translate
from services.common.telemetry import get_logger
from services.tokenizer.session import Session
from services.tokenizer.signal import Signal

SILENCE_S = 5.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
SIDE_CALL_TIMEOUT_S = 5.0

log = get_logger(__name__)
Reply = TypeVar("Reply")
if TYPE_CHECKING:
    Stub = scheduler_pb2_grpc.SchedulerAsyncStub


class SchedulerClient:
    """Connections to all schedulers; ``async with`` it, then submit to one of ``sessions``.

    Attributes:
        changed: Fires when a Session opens or ends and when engines come, go or report.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        text_fp: str,
        cluster_token: str | None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """
        Args:
            addresses: "host:port" or "dns:///name:port" each.
            text_fp: This tokenizer's fingerprint.
            cluster_token: What the schedulers want to see; ``None`` = nothing.
            silence_s: Without a frame for so long a scheduler counts as dead.
        """
        self.changed = Signal()
        self._endpoints = Endpoints(addresses)
        self._text_fp = text_fp
        self._cluster_token = cluster_token
        self._silence_s = silence_s
        self._sessions: dict[str, Session] = {}
        self._stubs: dict[str, Stub] = {}

    @property
    def sessions(self) -> list[Session]:
        """The Sessions that stand, in the order of their addresses."""
        return [session for _, session in sorted(self._sessions.items()) if session.is_open]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the Sessions for as long as the context lasts."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._follow_addresses(tasks))
            try:
                yield
            finally:
                watch.cancel()

    async def ask_each(self, call: Callable[[Stub], Awaitable[Reply]]) -> list[Reply]:
        """Make a side call to every scheduler that can be reached.

        Args:
            call: Given a stub, makes the call with a timeout of ``SIDE_CALL_TIMEOUT_S``.

        Returns:
            The replies of those that answered.
        """
        replies = await asyncio.gather(
            *(self._ask(address, call) for address in sorted(self._stubs))
        )
        return [reply for reply in replies if reply is not None]

    async def _ask(self, address: str, call: Callable[[Stub], Awaitable[Reply]]) -> Reply | None:
        try:
            return await call(self._stubs[address])
        except grpc.aio.AioRpcError as error:
            log.warning("scheduler_not_asked", address=address, error=translate(error).message)
            return None

    async def _follow_addresses(self, tasks: asyncio.TaskGroup) -> None:
        kept: dict[str, asyncio.Task[NoReturn]] = {}
        try:
            async for addresses in self._endpoints.watch():
                for address in kept.keys() - addresses:
                    kept.pop(address).cancel()
                for address in sorted(addresses - kept.keys()):
                    kept[address] = tasks.create_task(self._keep_session(address))
        finally:
            for task in kept.values():
                task.cancel()

    async def _keep_session(self, address: str) -> NoReturn:
        """Hold a Session with one scheduler, again and again."""
        channel = connect(address, cluster_token=self._cluster_token)
        self._stubs[address] = scheduler_pb2_grpc.SchedulerStub(channel)
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                was_open = await self._hold_session(address)
                backoff_s = FIRST_BACKOFF_S if was_open else min(2 * backoff_s, MAX_BACKOFF_S)
                await asyncio.sleep(backoff_s)
        finally:
            del self._stubs[address]
            await channel.close()

    async def _hold_session(self, address: str) -> bool:
        """Run one Session to its end; returns whether the scheduler had welcomed us."""
        session = Session(
            address,
            self._stubs[address],
            session_id=secrets.token_hex(8),
            text_fp=self._text_fp,
            silence_s=self._silence_s,
            on_change=self.changed.fire,
        )
        self._sessions[address] = session
        try:
            await session.run()
        except WorkerLost as error:
            log.warning("session_ended", address=address, error=error.message)
        finally:
            del self._sessions[address]
        return session.was_open
