"""A scheduler's Attach side for the worker's tests: real gRPC, told by the test what to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from services.common.pb import scheduler_pb2_grpc, worker_pb2
from services.common.rpc import PROTOCOL, RpcServer

HEARTBEAT_S = 0.2


class FakeAttachment:
    """One stream, seen from the scheduler.

    Attributes:
        hello: What the worker said first.
        is_silent: No heartbeats are sent.
    """

    def __init__(self, hello: worker_pb2.WorkerHello) -> None:
        self.hello = hello
        self.is_silent = False
        self._to_worker: asyncio.Queue[worker_pb2.EngineFrame | None] = asyncio.Queue()
        self._from_worker: asyncio.Queue[worker_pb2.WorkerFrame | None] = asyncio.Queue()

    def send(self, frame: worker_pb2.EngineFrame) -> None:
        """Send a frame."""
        self._to_worker.put_nowait(frame)

    def welcome(self, **fields: str) -> None:
        """Accept the worker, or refuse or redirect it."""
        self.send(
            worker_pb2.EngineFrame(welcome=worker_pb2.EngineWelcome(protocol=PROTOCOL, **fields))
        )

    def send_step(self, step: worker_pb2.ScheduledStep) -> None:
        """Send a step."""
        self.send(worker_pb2.EngineFrame(step=step.SerializeToString()))

    def end(self) -> None:
        """End the stream well."""
        self._to_worker.put_nowait(None)

    async def expect(self, kind: str) -> worker_pb2.WorkerFrame:
        """The next frame of a kind; heartbeats and loading reports are skipped on the way."""
        while True:
            frame = await self._from_worker.get()
            assert frame is not None, f"the stream ended before a {kind} frame"
            found = frame.WhichOneof("frame")
            if found == kind:
                return frame
            assert found in ("heartbeat", "loading"), f"a {found} frame instead of {kind}"

    async def result(self) -> worker_pb2.StepResult:
        """The next step's result."""
        frame = await self.expect("step_result")
        return worker_pb2.StepResult.FromString(frame.step_result)

    async def ended(self) -> None:
        """Wait until the worker has left the stream."""
        while await self._from_worker.get() is not None:
            pass

    async def read(self, frames: AsyncIterator[worker_pb2.WorkerFrame]) -> None:
        """Take the worker's frames until there are no more."""
        try:
            async for frame in frames:
                self._from_worker.put_nowait(frame)
        finally:
            self._from_worker.put_nowait(None)

    async def frames(self) -> AsyncIterator[worker_pb2.EngineFrame]:
        """What is to be written, heartbeats between."""
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    frame = await self._to_worker.get()
            except TimeoutError:
                if self.is_silent:
                    continue
                frame = worker_pb2.EngineFrame(heartbeat=worker_pb2.Heartbeat())
            if frame is None:
                return
            yield frame


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Hands every attachment to the test."""

    def __init__(self) -> None:
        self.attachments: asyncio.Queue[FakeAttachment] = asyncio.Queue()

    async def Attach(
        self,
        request_iterator: AsyncIterator[worker_pb2.WorkerFrame],
        context: grpc.aio.ServicerContext[worker_pb2.WorkerFrame, worker_pb2.EngineFrame],
    ) -> AsyncIterator[worker_pb2.EngineFrame]:
        """The stream of one worker."""
        first = await anext(aiter(request_iterator))
        attachment = FakeAttachment(first.hello)
        self.attachments.put_nowait(attachment)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(attachment.read(request_iterator))
            async for frame in attachment.frames():
                yield frame
            reading.cancel()


@asynccontextmanager
async def fake_scheduler(*, port: int = 0) -> AsyncIterator[tuple[FakeScheduler, str]]:
    """A listening fake and its address; its streams break when it is left."""
    scheduler = FakeScheduler()
    server = RpcServer(host="127.0.0.1", port=port, cluster_token=None)
    server.add(
        scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler, "sluiceway.v1.Scheduler"
    )
    address = await server.start()
    try:
        yield scheduler, address
    finally:
        await server.stop(grace_s=0)
