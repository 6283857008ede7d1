"""A scheduler that answers every request with scripted tokens, over real gRPC.

One ``StepFrame`` per step for everything that runs, like the real one; ``answer`` says what each
choice is given. It can be told to refuse, to be slow, to fall silent, to lose tokens and to die.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.common.errors import SluicewayError
from services.common.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.common.rpc import PROTOCOL, RpcServer

HEARTBEAT_S = 0.1


@dataclass(frozen=True)
class Answer:
    """What one choice gets.

    Attributes:
        token_ids: Its output, in order.
        reason: How it ends after them.
        stop_token_id: Named in its end.
        tokens_per_step: How many of them come in one step.
        top_logprobs: Per token, so many alternatives (-1, -2, ... below the sampled one); ``None``
            = no log-probabilities.
        prompt_logprobs: Whether the prompt's come too, in two parts.
        refusal: End at once with this error, unaccepted.
        error: End with this error after the tokens.
        is_endless: Never end by itself.
    """

    token_ids: Sequence[int] = ()
    reason: int = common_pb2.FINISH_REASON_LENGTH
    stop_token_id: int | None = None
    tokens_per_step: int = 1
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    refusal: SluicewayError | None = None
    error: SluicewayError | None = None
    is_endless: bool = False


Script = Callable[[scheduler_pb2.Add, int], Answer]


def engine_state(
    *,
    text_fp: str,
    engine_id: int = 1,
    phase: int = common_pb2.ENGINE_PHASE_READY,
    max_model_len: int = 256,
    **load: float,
) -> common_pb2.EngineState:
    """An engine as its scheduler shows it."""
    state = common_pb2.EngineState(
        engine_id=engine_id, worker_id=f"worker-{engine_id}", phase=phase, text_fp=text_fp
    )
    state.info.max_model_len = max_model_len
    state.info.revision = "r"
    state.info.kv_groups.add(block_size=4, kind="full")
    state.load.CopyFrom(common_pb2.Load(**load))  # type: ignore[arg-type]
    return state


@dataclass
class _Running:
    handle: int
    add: scheduler_pb2.Add
    answer: Answer
    offset: int = 0

    @property
    def has_more(self) -> bool:
        """Whether the next step brings tokens or an end; an endless one runs out of tokens."""
        return not self.answer.is_endless or self.offset < len(self.answer.token_ids)


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """The servicer.

    Attributes:
        answer: Given an Add and the index of a choice, what that choice gets.
        engines: Shown in the Welcome and in every heartbeat.
        step_s: Seconds from one step to the next; 0 = as fast as it goes.
        accepts: Whether an Add is acknowledged with a Queued and run; if not, it just waits.
        drop_next_token: Lose a token once, so that an offset has a gap.
        garble_next_step: Lose a row's count once, so that the columns differ in length.
        adds, aborts, acks, hellos: What clients have sent.
    """

    answer: Script
    engines: list[common_pb2.EngineState]
    step_s: float = 0.0
    accepts: bool = True
    is_silent: bool = False
    drop_next_token: bool = False
    garble_next_step: bool = False
    address: str = ""
    adds: list[scheduler_pb2.Add] = field(default_factory=list)
    aborts: list[scheduler_pb2.Abort] = field(default_factory=list)
    acks: list[int] = field(default_factory=list)
    hellos: list[scheduler_pb2.SessionHello] = field(default_factory=list)
    num_frames: int = 0
    num_client_heartbeats: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _sessions: list[_FakeSession] = field(default_factory=list)
    _server: RpcServer | None = None

    @asynccontextmanager
    async def serving(self, *, port: int = 0) -> AsyncIterator[str]:
        """Serve on loopback; yields the address. Leaving kills every Session at once."""
        server = RpcServer(host="127.0.0.1", port=port, cluster_token=None)
        server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, self, "Scheduler")
        self.address = await server.start()
        self._server = server
        try:
            yield self.address
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End every Session at once and stop listening."""
        assert self._server is not None
        await self._server.stop(grace_s=0)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
        """Wait until something is true of what was received."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def Session(self, requests, context):  # type: ignore[no-untyped-def]
        """One Session: a reader beside the step loop."""
        session = _FakeSession(self)
        self._sessions.append(session)
        reader = asyncio.ensure_future(session.read(requests))
        try:
            async for frame in session.frames():
                yield frame
        finally:
            reader.cancel()

    async def Explain(self, request, context):  # type: ignore[no-untyped-def]
        """Knows the requests that were added."""
        known = [add.key.request_id for add in self.adds]
        return common_pb2.ExplainReply(found=request.request_id in known, state="running")

    async def ResetCache(self, request, context):  # type: ignore[no-untyped-def]
        """Always resets."""
        return common_pb2.ResetCacheReply(engines_reset=len(self.engines))

    async def Drain(self, request, context):  # type: ignore[no-untyped-def]
        """Always drains."""
        return common_pb2.DrainReply(engines_draining=len(self.engines))

    async def announce(self) -> None:
        """Send ``engines`` to every client now."""
        for session in self._sessions:
            session.wake.set()

    async def note(self) -> None:
        """Wake whoever waits in ``until``."""
        async with self.changed:
            self.changed.notify_all()


class _FakeSession:
    def __init__(self, fake: FakeScheduler) -> None:
        self.fake = fake
        self.wake = asyncio.Event()
        self._running: dict[int, _Running] = {}
        self._queued: list[int] = []
        self._finished: list[scheduler_pb2.FinishedHandle] = []
        self._frame = 0
        self._next_step_at = 0.0

    async def read(self, requests: AsyncIterator[scheduler_pb2.ClientFrame]) -> None:
        async for frame in requests:
            kind = frame.WhichOneof("frame")
            if kind == "hello":
                self.fake.hellos.append(frame.hello)
            elif kind == "add":
                self._add(frame.add)
            elif kind == "abort":
                self._abort(frame.abort)
            elif kind == "ack":
                self.fake.acks.append(frame.ack.frame)
            elif kind == "heartbeat":
                self.fake.num_client_heartbeats += 1
            self.wake.set()
            await self.fake.note()

    def _add(self, add: scheduler_pb2.Add) -> None:
        self.fake.adds.append(add)
        for choice in add.choices:
            answer = self.fake.answer(add, choice.index)
            if answer.refusal is not None:
                self._finished.append(_finished(choice.handle, answer.refusal))
                continue
            self._queued.append(choice.handle)
            offset = len(choice.resume_ids)
            self._running[choice.handle] = _Running(choice.handle, add, answer, offset)

    def _abort(self, abort: scheduler_pb2.Abort) -> None:
        self.fake.aborts.append(abort)
        is_stop = abort.reason == scheduler_pb2.ABORT_REASON_STOP_STRING
        for handle, kept in zip(abort.handle, abort.kept_tokens, strict=True):
            row = self._running.pop(handle, None)
            if row is not None:
                end = _finished(handle, None, usage_of=row)
                end.reason = (
                    common_pb2.FINISH_REASON_STOP if is_stop else common_pb2.FINISH_REASON_ABORT
                )
                end.usage.wasted_tokens = row.offset - kept
                end.usage.output_tokens = kept
                self._finished.append(end)

    async def frames(self) -> AsyncIterator[scheduler_pb2.ServerFrame]:
        while self.fake.is_silent:
            await self._pause()
        welcome = scheduler_pb2.SessionWelcome(protocol=PROTOCOL, engines=self.fake.engines)
        yield scheduler_pb2.ServerFrame(welcome=welcome)
        while True:
            await self._pause()
            if self.fake.is_silent:
                continue
            if self._queued and self.fake.accepts:
                yield self._queued_frame()
            if self._is_stepping() or self._finished:
                yield self._step()
            else:
                heartbeat = scheduler_pb2.ServerHeartbeat(engines=self.fake.engines)
                yield scheduler_pb2.ServerFrame(heartbeat=heartbeat)

    def _is_stepping(self) -> bool:
        return bool(self._running) and self.fake.accepts and not self.fake.is_silent

    def _has_more(self) -> bool:
        return self._is_stepping() and any(row.has_more for row in self._running.values())

    async def _pause(self) -> None:
        if self._has_more():
            # Paced by the clock: what a step costs does not slow the next one down.
            now = time.monotonic()
            self._next_step_at = max(self._next_step_at + self.fake.step_s, now)
            await asyncio.sleep(self._next_step_at - now)
            return
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self.wake.wait()
        except TimeoutError:
            return
        self.wake.clear()

    def _queued_frame(self) -> scheduler_pb2.ServerFrame:
        handles, self._queued = self._queued, []
        return scheduler_pb2.ServerFrame(
            queued=scheduler_pb2.QueuedFrame(
                handle=handles, position=[0] * len(handles), eta_ms=[0] * len(handles)
            )
        )

    def _step(self) -> scheduler_pb2.ServerFrame:
        self._frame += 1
        self.fake.num_frames += 1
        step = scheduler_pb2.StepFrame(frame=self._frame, engine_id=self.fake.engines[0].engine_id)
        for row in list(self._running.values()) if self.fake.accepts else ():
            self._advance(step, row)
        step.finished.extend(self._finished)
        self._finished.clear()
        if self.fake.garble_next_step and step.count:
            self.fake.garble_next_step = False
            del step.count[-1]
        step.load.generated_tokens = self._frame
        step.load.running = len(self._running)
        return scheduler_pb2.ServerFrame(step=step)

    def _advance(self, step: scheduler_pb2.StepFrame, row: _Running) -> None:
        answer = row.answer
        if row.offset == 0 and answer.prompt_logprobs:
            _add_prompt_logprobs(step, row)
        new = list(answer.token_ids[row.offset : row.offset + answer.tokens_per_step])
        step.handle.append(row.handle)
        step.offset.append(row.offset)
        step.count.append(len(new))
        for token_id in new:
            if answer.top_logprobs is not None:
                _add_logprobs(step, len(step.token_ids), token_id, answer.top_logprobs)
            step.token_ids.append(token_id)
        row.offset += len(new)
        if self.fake.drop_next_token:
            self.fake.drop_next_token = False
            row.offset += 1
        if row.offset >= len(answer.token_ids) and not answer.is_endless:
            del self._running[row.handle]
            end = _finished(row.handle, answer.error, usage_of=row)
            if answer.stop_token_id is not None:
                end.stop_token_id = answer.stop_token_id
            step.finished.append(end)


def _finished(
    handle: int, error: SluicewayError | None, *, usage_of: _Running | None = None
) -> scheduler_pb2.FinishedHandle:
    end = scheduler_pb2.FinishedHandle(handle=handle, reason=common_pb2.FINISH_REASON_ERROR)
    if error is not None:
        end.error.error_class = type(error).__name__
        end.error.message = error.message
        end.error.param = error.param or ""
        end.error.retry_after_ms = int((error.retry_after_s or 0) * 1000)
    elif usage_of is not None:
        end.reason = usage_of.answer.reason
    if usage_of is not None:
        end.usage.prompt_tokens = len(usage_of.add.prompt_ids)
        end.usage.output_tokens = usage_of.offset
        end.life.attempt = usage_of.add.key.attempt
    return end


def _add_logprobs(
    step: scheduler_pb2.StepFrame, position: int, token_id: int, num_top: int
) -> None:
    rows = step.logprobs
    rows.position.append(position)
    rows.logprob.append(-0.5)
    rows.rank.append(1)
    rows.num_top.append(num_top)
    rows.top_ids.extend(max(token_id - i, 0) for i in range(num_top))
    rows.top_logprobs.extend(-0.5 - i for i in range(num_top))


def _add_prompt_logprobs(step: scheduler_pb2.StepFrame, row: _Running) -> None:
    ids = row.add.prompt_ids
    middle = (len(ids) + 1) // 2
    for start, stop in ((1, middle), (middle, len(ids))):
        part = ids[start:stop]
        if part:
            step.prompt_logprobs.add(
                handle=row.handle,
                start=start,
                token_ids=part,
                logprob=[-1.0] * len(part),
                rank=[1] * len(part),
                num_top=[1] * len(part),
                top_ids=part,
                top_logprobs=[-1.0] * len(part),
            )
