"""A tokenizer's side of a Session, for tests: checks every frame against the rules of the wire."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import grpc

from services.common.convert import constraint_to_message, sampling_to_message
from services.common.pb import common_pb2, scheduler_pb2_grpc
from services.common.pb import scheduler_pb2 as pb
from services.common.rpc import PROTOCOL, connect
from services.common.sampling import Constraint, SamplingParams

HEARTBEAT_S = 0.2


@dataclass(slots=True)
class Heard:
    """What a handle was told."""

    resumed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    finished: pb.FinishedHandle | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class SessionClient:
    """Use as ``async with SessionClient(address) as client``.

    Attributes:
        handles: What each handle was told.
        frames: Step frames that have come.
        engines: engine_id -> state, from welcome, ups, downs and heartbeats.
        violations: What the scheduler did wrong.
        acknowledges: Whether frames are acknowledged: each at once or, ``in_passing``, the newest
            with each heartbeat, as a tokenizer does.
        ended: Set once the stream has ended; ``error`` says how.
    """

    def __init__(
        self,
        address: str,
        *,
        text_fp: str = "text-fp",
        protocol: int = PROTOCOL,
        cluster_token: str | None = None,
        in_passing: bool = False,
    ) -> None:
        self.handles: dict[int, Heard] = {}
        self.frames: list[pb.StepFrame] = []
        self.engines: dict[int, common_pb2.EngineState] = {}
        self.downs: list[pb.EngineDown] = []
        self.violations: list[str] = []
        self.acknowledges = True
        self._in_passing = in_passing
        self.num_heartbeats = 0
        self.welcomed = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: grpc.aio.AioRpcError | None = None
        self.changed = asyncio.Event()
        self._address = address
        self._token = cluster_token
        self._name = secrets.token_hex(4)  # of two clients no request may pass for the other's
        self._hello = pb.SessionHello(protocol=protocol, session_id=self._name, text_fp=text_fp)
        self._outbox: asyncio.Queue[pb.ClientFrame] = asyncio.Queue()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._is_silent = False
        self._last_handle = 0
        self._num_requests = 0
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> SessionClient:
        await self._group.__aenter__()
        self._channel = connect(self._address, cluster_token=self._token)
        self._call = scheduler_pb2_grpc.SchedulerStub(self._channel).Session()
        self._outbox.put_nowait(pb.ClientFrame(hello=self._hello))
        self._tasks = [
            self._group.create_task(self._read()),
            self._group.create_task(self._write()),
            self._group.create_task(self._beat()),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.die()
        await self._group.__aexit__(kind, error, trace)

    async def die(self) -> None:
        """End at once, as a killed process does."""
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await self._channel.close()
        self.ended.set()

    # What is asked

    def add(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        attempt: int = 0,
        resume_ids: Sequence[Sequence[int]] = ((),),
        deadline_ms: int | None = None,
        constraint: Constraint | None = None,
        model: str = "",
        crashes: int = 0,
    ) -> list[int]:
        """Add a request with a choice per entry of ``resume_ids``.

        Returns:
            The handles.
        """
        self._num_requests += 1
        add = pb.Add(
            key=common_pb2.RequestKey(
                request_id=request_id or f"{self._name}-{self._num_requests}", attempt=attempt
            ),
            prompt_ids=prompt_ids,
            sampling=sampling_to_message(sampling or SamplingParams(temperature=0.0, max_tokens=4)),
            model=model,
            crashes=crashes,
        )
        if deadline_ms is not None:
            add.deadline_ms = deadline_ms
        if constraint is not None:
            add.constraint.CopyFrom(constraint_to_message(constraint))
        handles = []
        for index, resumed in enumerate(resume_ids):
            self._last_handle += 1
            handles.append(self._last_handle)
            add.choices.add(handle=self._last_handle, index=index, resume_ids=resumed)
            self.handles[self._last_handle] = Heard(resumed=len(resumed))
        self.say(pb.ClientFrame(add=add))
        return handles

    def abort(
        self,
        *handles: int,
        reason: pb.AbortReason.ValueType = pb.ABORT_REASON_CLIENT_GONE,
        kept_tokens: Sequence[int] = (),
    ) -> None:
        """Abort handles."""
        abort = pb.Abort(handle=handles, reason=reason, kept_tokens=kept_tokens)
        self.say(pb.ClientFrame(abort=abort))

    def say(self, frame: pb.ClientFrame) -> None:
        """Send any frame, also a wrong one."""
        self._outbox.put_nowait(frame)

    def stop_reading(self) -> None:
        """Leave frames unread; heartbeats go on."""
        self._may_read.clear()

    def read_on(self) -> None:
        """Undo ``stop_reading``."""
        self._may_read.set()

    def fall_silent(self) -> None:
        """Send no more heartbeats."""
        self._is_silent = True

    async def finished(self, handle: int, *, timeout_s: float = 30.0) -> pb.FinishedHandle:
        """Wait for a handle's end."""
        async with asyncio.timeout(timeout_s):
            await self.handles[handle].done.wait()
        end = self.handles[handle].finished
        assert end is not None
        return end

    async def tokens(self, handle: int, count: int, *, timeout_s: float = 30.0) -> list[int]:
        """Wait until a handle has at least ``count`` tokens."""
        heard = self.handles[handle]
        async with asyncio.timeout(timeout_s):
            while len(heard.token_ids) < count:
                heard.news.clear()
                await heard.news.wait()
        return heard.token_ids

    async def accepted(self, handle: int, *, timeout_s: float = 30.0) -> None:
        """Wait for a handle's acceptance."""
        heard = self.handles[handle]
        async with asyncio.timeout(timeout_s):
            while not heard.queued:
                heard.news.clear()
                await heard.news.wait()

    def acknowledge_all(self) -> None:
        """Acknowledge every frame that has come."""
        if self.frames:
            self.say(pb.ClientFrame(ack=pb.FrameAck(frame=self.frames[-1].frame)))

    async def until_ready(self, count: int = 1, *, timeout_s: float = 30.0) -> None:
        """Wait until exactly ``count`` engines are ready."""
        async with asyncio.timeout(timeout_s):
            while self.num_ready != count:
                self.changed.clear()
                await self.changed.wait()

    async def until_sees_ready(self, engine_id: int, *, timeout_s: float = 30.0) -> None:
        """Wait until one engine is ready."""
        async with asyncio.timeout(timeout_s):
            while engine_id not in self._ready_ids():
                self.changed.clear()
                await self.changed.wait()

    @property
    def num_ready(self) -> int:
        """Engines that are ready as far as this client knows."""
        return len(self._ready_ids())

    def _ready_ids(self) -> set[int]:
        ready = common_pb2.ENGINE_PHASE_READY
        return {engine.engine_id for engine in self.engines.values() if engine.phase == ready}

    # What is heard

    async def _read(self) -> None:
        try:
            while True:
                await self._may_read.wait()
                frame = await self._call.read()
                if frame is grpc.aio.EOF:
                    break
                self._on_frame(frame)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            self.ended.set()
            raise
        self.ended.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader says how the stream ended

    async def _beat(self) -> None:
        while not self.ended.is_set():
            await asyncio.sleep(HEARTBEAT_S)
            if not self._is_silent:
                self.say(pb.ClientFrame(heartbeat={}))
                if self._in_passing:
                    self.acknowledge_all()

    def _on_frame(self, frame: pb.ServerFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "welcome":
            self.welcomed.set()
            self._see(frame.welcome.engines)
        elif kind == "engine_up":
            self._see([frame.engine_up.engine])
        elif kind == "engine_down":
            self.downs.append(frame.engine_down)
            self.engines.pop(frame.engine_down.engine_id, None)
            self.changed.set()
        elif kind == "heartbeat":
            self.num_heartbeats += 1
            self._see(frame.heartbeat.engines)
        elif kind == "queued":
            for handle, position in zip(frame.queued.handle, frame.queued.position, strict=True):
                self.handles[handle].queued.append(position)
                self.handles[handle].news.set()
        elif kind == "step":
            self._on_step(frame.step)

    def _see(self, engines: Sequence[common_pb2.EngineState]) -> None:
        for engine in engines:
            self.engines[engine.engine_id] = engine
        self.changed.set()

    def _on_step(self, step: pb.StepFrame) -> None:
        self.frames.append(step)
        start = 0
        owner: dict[int, int] = {}
        for handle, offset, count in zip(step.handle, step.offset, step.count, strict=True):
            heard = self.handles[handle]
            if heard.finished is not None:
                self._complain(f"handle {handle} got tokens after its end")
            if not heard.queued:
                self._complain(f"handle {handle} got tokens before its acceptance")
            if offset != heard.resumed + len(heard.token_ids):
                self._complain(f"handle {handle} has a gap at offset {offset}")
            heard.token_ids.extend(step.token_ids[start : start + count])
            owner.update(dict.fromkeys(range(start, start + count), handle))
            start += count
            heard.news.set()
        if start != len(step.token_ids):
            self._complain(
                f"frame {step.frame} has {len(step.token_ids)} tokens, counts say {start}"
            )
        for position, logprob in zip(step.logprobs.position, step.logprobs.logprob, strict=True):
            self.handles[owner[position]].logprobs.append(logprob)
        for end in step.finished:
            self._on_finished(end)
        if self.acknowledges and not self._in_passing:
            self.say(pb.ClientFrame(ack=pb.FrameAck(frame=step.frame)))

    def _on_finished(self, end: pb.FinishedHandle) -> None:
        heard = self.handles[end.handle]
        if heard.finished is not None:
            self._complain(f"handle {end.handle} ended twice")
        heard.finished = end
        heard.done.set()
        heard.news.set()

    def _complain(self, text: str) -> None:
        self.violations.append(text)
