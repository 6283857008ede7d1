"""One attachment: from Hello to the end of the stream. One engine_id, one life.

Steps go from the stream to the executor unread, results back the same way. Everything that ends an
attachment is raised as ``_Over`` inside its TaskGroup, so that each end is written down once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeAlias, TypeVar

import grpc

from services.common.convert import constraint_from_message, error_to_message
from services.common.errors import InvalidRequest, InvariantError, SluicewayError
from services.common.lifecycle import raise_if_cancelled
from services.common.pb import scheduler_pb2_grpc, worker_pb2
from services.common.rpc import PROTOCOL, connect, translate
from services.common.telemetry import get_logger
from services.worker.convert import facts_to_message, loading_to_message
from services.worker.executor import Executor
from services.worker.identity import Identity
from services.worker.peer_watch import HEARTBEAT_S, PeerWatch
from services.worker.state import WorkerState

log = get_logger(__name__)
Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.WorkerFrame, worker_pb2.EngineFrame]"

E = TypeVar("E", bound=BaseException)

_OUTBOX_FRAMES = 256
"""Frames that may wait to be written, far more than steps in flight; full = nobody reads."""

_PROGRESS_S = 0.2
"""Time between two reports of loading."""


class End(Enum):
    """How an attachment ended."""

    CLOSED = "closed"  # the scheduler ended the stream
    LOST = "lost"  # the stream broke
    SILENT = "silent"  # no frame for too long
    REFUSED = "refused"
    REDIRECTED = "redirected"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attachment ended.

    Attributes:
        end: Kind.
        detail: For people.
        redirect: Address to dial instead, if ``end`` is REDIRECTED.
        was_welcome: The scheduler had accepted the worker.
    """

    end: End
    detail: str
    redirect: str
    was_welcome: bool


class _Over(Exception):
    """The attachment is over."""

    def __init__(self, end: End, detail: str = "", *, redirect: str = "") -> None:
        super().__init__(detail)
        self.end = end
        self.detail = detail
        self.redirect = redirect


class SchedulerLink:
    """One attachment to one scheduler. Make one, call ``run`` once."""

    def __init__(
        self,
        address: str,
        *,
        cluster_token: str | None,
        identity: Identity,
        state: WorkerState,
        executor: Executor,
        leaving: asyncio.Event,
    ) -> None:
        """
        Args:
            address: "host:port" of the scheduler.
            cluster_token: What the call carries.
            identity: Who attaches.
            state: Holds the engine id of this attachment; told of its course.
            executor: Idle, and without rows.
            leaving: Set when the worker wants to drain and leave.
        """
        self._address = address
        self._cluster_token = cluster_token
        self._identity = identity
        self._state = state
        self._executor = executor
        self._leaving = leaving
        self._outbox: asyncio.Queue[worker_pb2.WorkerFrame] = asyncio.Queue(_OUTBOX_FRAMES)
        self._watch = PeerWatch(period_s=HEARTBEAT_S, now=time.monotonic())
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._welcome = asyncio.Event()
        self._may_leave = False
        self._handlers: dict[str, Callable[[worker_pb2.EngineFrame], None]] = {
            "welcome": self._on_welcome,
            "step": self._on_step,
            "prepare": self._on_prepare,
            "release": self._on_release,
            "drain": self._on_drain,
        }

    async def run(self) -> Outcome:
        """Attach and stay until the attachment is over."""
        channel = connect(self._address, cluster_token=self._cluster_token)
        over = _Over(End.LOST)
        try:
            call: Call = scheduler_pb2_grpc.SchedulerStub(channel).Attach()
            self._put(worker_pb2.WorkerFrame(hello=self._hello()))
            try:
                await self._stay(call)
            except* grpc.aio.AioRpcError as group:
                error = translate(_first(group))
                over = _Over(End.LOST, f"{type(error).__name__}: {error.message}")
            except* _Over as group:
                over = _first(group)
            finally:
                call.cancel()
        finally:
            self._broken.cancel()
            self._state.is_ready = False
            self._state.scheduler_address = ""
            await channel.close()
        raise_if_cancelled()
        return Outcome(over.end, over.detail, over.redirect, self._welcome.is_set())

    async def _stay(self, call: Call) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(call))
            tasks.create_task(self._write(call))
            tasks.create_task(self._beat())
            tasks.create_task(self._announce())
            tasks.create_task(self._leave())
            await self._break()

    async def _read(self, call: Call) -> None:
        async for frame in call:
            self._watch.heard(time.monotonic())
            kind = frame.WhichOneof("frame")
            handle = self._handlers.get(kind or "")
            if handle is not None:
                handle(frame)
        raise _Over(End.DRAINED if self._may_leave else End.CLOSED)

    async def _write(self, call: Call) -> None:
        while True:
            frame = await self._outbox.get()
            try:
                await call.write(frame)
            except asyncio.InvalidStateError:  # how grpc says that the call has ended
                raise _Over(End.LOST, "the stream ended while a frame was written") from None

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if self._watch.is_dead(now):
                raise _Over(End.SILENT, f"no frame for {self._watch.silent_s(now):.1f} s")
            age_ms = round(self._executor.step_age_s() * 1000)
            self._put(worker_pb2.WorkerFrame(heartbeat=worker_pb2.Heartbeat(step_age_ms=age_ms)))

    async def _announce(self) -> None:
        """Report loading until it is done, then say that steps may come."""
        await self._welcome.wait()
        told = None
        while self._state.facts is None:
            if self._state.progress != told:
                told = self._state.progress
                self._put(worker_pb2.WorkerFrame(loading=loading_to_message(told)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROGRESS_S):
                    await self._state.loaded.wait()
        info = facts_to_message(self._state.facts, revision=self._identity.revision)
        self._put(worker_pb2.WorkerFrame(ready=worker_pb2.Ready(info=info)))
        self._state.is_ready = True
        log.info("attached", scheduler=self._address, engine_id=self._state.engine_id)

    async def _leave(self) -> None:
        """Ask to be drained; the scheduler answers ``drain`` once nothing more will come."""
        await self._leaving.wait()
        if not self._state.is_ready:
            raise _Over(End.DRAINED, "nothing had begun")
        self._put(worker_pb2.WorkerFrame(drained=worker_pb2.Drained()))

    async def _break(self) -> None:
        await self._broken

    def _on_welcome(self, frame: worker_pb2.EngineFrame) -> None:
        welcome = frame.welcome
        if welcome.refused:
            raise _Over(End.REFUSED, welcome.refused)
        if welcome.redirect:
            raise _Over(End.REDIRECTED, redirect=welcome.redirect)
        if welcome.protocol not in (PROTOCOL, PROTOCOL - 1):
            raise _Over(
                End.REFUSED, f"it speaks protocol {welcome.protocol}, this worker {PROTOCOL}"
            )
        self._state.scheduler_address = self._address
        self._welcome.set()

    def _on_step(self, frame: worker_pb2.EngineFrame) -> None:
        future = asyncio.wrap_future(self._executor.submit(frame.step))
        future.add_done_callback(self._on_result)

    def _on_result(self, future: asyncio.Future[bytes]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if self._broken.done():
            return  # the attachment is over: nobody waits for this result
        if error is None:
            self._put(worker_pb2.WorkerFrame(step_result=future.result()))
        else:
            detail = f"a step could not be run: {type(error).__name__}: {error}"
            self._broken.set_exception(_Over(End.LOST, detail))

    def _on_prepare(self, frame: worker_pb2.EngineFrame) -> None:
        ref = frame.prepare.ref
        try:
            constraint = constraint_from_message(frame.prepare.grammar)
        except ValueError as error:
            self._put_prepared(ref, InvalidRequest(f"the constraint is unknown: {error}"))
            return
        future = asyncio.wrap_future(self._executor.prepare(ref, constraint))
        future.add_done_callback(partial(self._on_prepared, ref))

    def _on_prepared(self, ref: int, future: asyncio.Future[None]) -> None:
        if not future.cancelled():
            self._put_prepared(ref, future.exception())

    def _put_prepared(self, ref: int, error: BaseException | None) -> None:
        prepared = worker_pb2.Prepared(ref=ref)
        if error is not None:
            if not isinstance(error, SluicewayError):
                log.error("grammar_failed", exc_info=error)
                error = InvariantError("the worker could not compile the constraint")
            prepared.error.CopyFrom(error_to_message(error))
        self._put(worker_pb2.WorkerFrame(prepared=prepared))

    def _on_release(self, frame: worker_pb2.EngineFrame) -> None:
        self._executor.release(list(frame.release.ref))

    def _on_drain(self, frame: worker_pb2.EngineFrame) -> None:
        """Nothing more will come, and nothing is running: say so; the scheduler ends the stream."""
        self._may_leave = True
        self._put(worker_pb2.WorkerFrame(drained=worker_pb2.Drained()))

    def _put(self, frame: worker_pb2.WorkerFrame) -> None:
        try:
            self._outbox.put_nowait(frame)
        except asyncio.QueueFull:
            if not self._broken.done():
                detail = f"{_OUTBOX_FRAMES} frames wait: the scheduler does not read"
                self._broken.set_exception(_Over(End.LOST, detail))

    def _hello(self) -> worker_pb2.WorkerHello:
        hello = worker_pb2.WorkerHello(
            protocol=PROTOCOL,
            worker_id=self._identity.worker_id,
            engine_id=self._state.engine_id,
            model=self._identity.model,
            text_fp=self._identity.text_fp,
            kv_fp=self._identity.kv_fp,
            address=self._state.address,
        )
        if self._state.facts is None:
            hello.loading.CopyFrom(loading_to_message(self._state.progress))
        return hello


def _first(group: BaseExceptionGroup[E]) -> E:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
