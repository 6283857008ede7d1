"""A real scheduler on loopback; workers and tokenizers are fakes that speak real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from services.common.rpc import connect
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import OpenScheduler, open_scheduler
from tests.fakes.worker import FakeWorker, FakeWorkerSpec
from tests.unit.scheduler.session_client import SessionClient


class Stage:
    """A scheduler, and workers and clients that end with the test.

    Attributes:
        scheduler: The scheduler.
        workers: All that were attached.
        clients: All that were connected.
    """

    def __init__(
        self, scheduler: OpenScheduler, stack: AsyncExitStack, tasks: asyncio.TaskGroup
    ) -> None:
        self.scheduler = scheduler
        self.workers: list[FakeWorker] = []
        self.clients: list[SessionClient] = []
        self._stack = stack
        self._tasks = tasks

    async def worker(
        self, spec: FakeWorkerSpec | None = None, *, becomes_ready: bool = True
    ) -> FakeWorker:
        """Attach a worker."""
        worker = FakeWorker(self.scheduler.address, spec, becomes_ready=becomes_ready)
        self.workers.append(worker)
        return await self._stack.enter_async_context(worker)

    async def client(self, *, text_fp: str = "text-fp", protocol: int = 1) -> SessionClient:
        """Connect a tokenizer."""
        client = SessionClient(self.scheduler.address, text_fp=text_fp, protocol=protocol)
        self.clients.append(client)
        return await self._stack.enter_async_context(client)

    async def pair(self, spec: FakeWorkerSpec | None = None) -> tuple[FakeWorker, SessionClient]:
        """Attach one worker, connect one tokenizer, and wait until requests would succeed."""
        worker = await self.worker(spec)
        client = await self.client()
        await client.until_ready()
        return worker, client

    async def channel(self) -> grpc.aio.Channel:
        """A channel to the scheduler, for unary calls."""
        channel = connect(self.scheduler.address, cluster_token=None)
        self._stack.push_async_callback(channel.close)
        return channel

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until the test ends."""
        task = self._tasks.create_task(work)
        self._stack.callback(task.cancel)

    def blocks_used(self) -> int:
        """KV blocks that requests hold, over all engines."""
        engines = [a.engine for a in self.scheduler.fleet.attachments() if a.engine is not None]
        return sum(engine.load().kv_blocks_used for engine in engines)

    def check(self) -> None:
        """Nobody has broken the rules."""
        for worker in self.workers:
            assert worker.executor.violations == []
        for client in self.clients:
            assert client.violations == []


@pytest.fixture
def scheduler_config() -> SchedulerConfig:
    """Settings of the ``stage``'s scheduler; override per module or parametrise."""
    return SchedulerConfig(port=0, http_port=0)


@pytest.fixture
async def stage(scheduler_config: SchedulerConfig) -> AsyncIterator[Stage]:
    """A running scheduler; at the end everybody's rules are checked."""
    async with (
        open_scheduler(scheduler_config) as scheduler,
        asyncio.TaskGroup() as tasks,
        AsyncExitStack() as stack,
    ):
        stage = Stage(scheduler, stack, tasks)
        yield stage
        stage.check()
