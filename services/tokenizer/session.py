"""One Session with one scheduler, from its Hello until it breaks (wire.md section 2).

Three tasks and no more, however many requests: one reads frames and hands tokens to their
receivers, one writes what the outbox holds, one keeps time (acknowledgements, heartbeats, silence).
They live and die together in one TaskGroup.

What a frame means for a handle is decided in ``handles.py``. Every handle ends exactly once, also
when the Session breaks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import grpc

from services.common.errors import Overloaded, WorkerLost
from services.common.lifecycle import raise_if_cancelled
from services.common.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from services.common.rpc import PROTOCOL, translate
from services.tokenizer.convert import (
    LogprobReader,
    abort_to_message,
    finished_from_message,
    prompt_logprobs_from_message,
    submission_to_message,
)
from services.tokenizer.handles import Handles, OffsetGap
from services.tokenizer.tokens import AbortReason, Queued, Submission, TokenReceiver

TICK_S = 0.25
HEARTBEAT_S = 0.5
LATE_LOOP_S = 1.0
ACK_FRAMES = 32
MAX_OUTBOX_FRAMES = 4096

Call = grpc.aio.StreamStreamCall[scheduler_pb2.ClientFrame, scheduler_pb2.ServerFrame]


class Session:
    """A Session stream. Call ``run`` once; ``submit`` works from ``is_open`` until ``run`` ends."""

    def __init__(
        self,
        address: str,
        stub: scheduler_pb2_grpc.SchedulerAsyncStub,
        *,
        session_id: str,
        text_fp: str,
        silence_s: float,
        on_change: Callable[[], None],
    ) -> None:
        """
        Args:
            address: The scheduler's, for messages.
            stub: On a channel to it.
            session_id: Unique per Session.
            text_fp: This tokenizer's fingerprint.
            silence_s: Without a frame for so long the scheduler counts as dead.
            on_change: Called when engines come, go or report, and when the Session opens or ends.
        """
        self.address = address
        self._stub = stub
        self._hello = scheduler_pb2.SessionHello(
            protocol=PROTOCOL, session_id=session_id, text_fp=text_fp
        )
        self._silence_s = silence_s
        self._on_change = on_change
        self._engines: dict[int, common_pb2.EngineState] = {}
        self._handles = Handles()
        self._outbox: deque[scheduler_pb2.ClientFrame] = deque()
        self._outbox_filled = asyncio.Event()
        self._is_open = False
        self._was_open = False
        self._received_frame = 0
        self._acked_frame = 0
        self._heard_at = time.monotonic()
        self._sent_at = time.monotonic()
        self._on_frame: Mapping[str, Callable[[scheduler_pb2.ServerFrame], None]] = {
            "welcome": self._on_welcome,
            "engine_up": self._on_engine_up,
            "engine_down": self._on_engine_down,
            "queued": self._on_queued,
            "step": self._on_step,
            "heartbeat": self._on_heartbeat,
        }

    @property
    def is_open(self) -> bool:
        """Whether the scheduler has welcomed us and the stream still stands."""
        return self._is_open

    @property
    def was_open(self) -> bool:
        """Whether the scheduler has ever welcomed us."""
        return self._was_open

    @property
    def engines(self) -> list[common_pb2.EngineState]:
        """The scheduler's engines as it last told; not to be changed."""
        return list(self._engines.values())

    @property
    def num_handles(self) -> int:
        """Choices that have not ended."""
        return len(self._handles)

    @asynccontextmanager
    async def submit(
        self, submission: Submission, receiver: TokenReceiver
    ) -> AsyncIterator[TokenStream]:
        """Ask for tokens; leaving the context gives up whatever has not ended.

        Args:
            submission: At least one choice.
            receiver: Hears everything about it, also the ends that come after the context is left.

        Raises:
            WorkerLost: The Session is not open.
            Overloaded: The scheduler takes frames more slowly than we make them.
        """
        handles = self._add(submission, receiver)
        try:
            yield TokenStream(self, handles)
        finally:
            self.abort(handles, AbortReason.CLIENT_GONE)

    def _add(self, submission: Submission, receiver: TokenReceiver) -> list[int]:
        if not self._is_open:
            raise WorkerLost(f"the session with the scheduler at {self.address} has ended")
        if len(self._outbox) >= MAX_OUTBOX_FRAMES:
            raise Overloaded(
                f"the scheduler at {self.address} is not keeping up", retry_after_s=1.0
            )
        handles = self._handles.add(receiver, submission.choices)
        self._send(submission_to_message(submission, handles=handles))
        return handles

    def abort(self, handles: Sequence[int], reason: AbortReason) -> None:
        """Give up those of ``handles`` that run; each still ends in its own ``finished``."""
        given_up = self._handles.abort(handles)
        if given_up:
            self._send(
                abort_to_message(list(given_up), reason, kept_tokens=list(given_up.values()))
            )

    async def run(self) -> NoReturn:
        """Hold the Session until it breaks.

        Raises:
            WorkerLost: It broke; by then every handle has been told.
        """
        call: Call = self._stub.Session()
        self._send(scheduler_pb2.ClientFrame(hello=self._hello))
        why = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(call))
                tasks.create_task(self._write(call))
                await self._keep_time()
        except* WorkerLost as group:
            why = str(group.exceptions[0])
        finally:
            call.cancel()
            self._end()
        raise_if_cancelled()
        raise WorkerLost(why)

    def _end(self) -> None:
        """Tell every handle that is left; nothing can be submitted any more."""
        self._is_open = False
        self._handles.lose_all(
            WorkerLost(f"the session with the scheduler at {self.address} broke")
        )
        self._on_change()

    # --- reading ---

    async def _read(self, call: Call) -> NoReturn:
        try:
            async for frame in call:
                self._heard_at = time.monotonic()
                kind = frame.WhichOneof("frame")
                if kind is not None:  # a kind that only a newer peer knows
                    self._on_frame[kind](frame)
        except grpc.aio.AioRpcError as error:
            raise self._broken(translate(error).message) from None
        except OffsetGap as gap:
            raise self._broken(str(gap)) from None
        except (ValueError, IndexError) as error:  # columns of different lengths, unknown values
            raise self._broken(f"a frame makes no sense: {error}") from error
        raise self._broken("the scheduler closed the stream")

    def _on_welcome(self, frame: scheduler_pb2.ServerFrame) -> None:
        protocol = frame.welcome.protocol
        if protocol not in (PROTOCOL, PROTOCOL - 1):
            raise self._broken(f"it speaks protocol {protocol}, this tokenizer {PROTOCOL}")
        self._is_open = self._was_open = True
        self._engines = {engine.engine_id: engine for engine in frame.welcome.engines}
        self._on_change()

    def _on_engine_up(self, frame: scheduler_pb2.ServerFrame) -> None:
        engine = frame.engine_up.engine
        self._engines[engine.engine_id] = engine
        self._on_change()

    def _on_engine_down(self, frame: scheduler_pb2.ServerFrame) -> None:
        self._engines.pop(frame.engine_down.engine_id, None)
        self._on_change()

    def _on_heartbeat(self, frame: scheduler_pb2.ServerFrame) -> None:
        self._engines = {engine.engine_id: engine for engine in frame.heartbeat.engines}
        self._on_change()

    def _on_queued(self, frame: scheduler_pb2.ServerFrame) -> None:
        queued = frame.queued
        for handle, position, eta_ms in zip(
            queued.handle, queued.position, queued.eta_ms, strict=True
        ):
            self._handles.queue(handle, Queued(position, eta_ms))

    def _on_step(self, frame: scheduler_pb2.ServerFrame) -> None:
        step = frame.step
        if step.HasField("load"):
            self._take_load(step.engine_id, step.load)
        for rows in step.prompt_logprobs:
            self._handles.prompt_logprobs(rows.handle, prompt_logprobs_from_message(rows))
        self._deliver(step)
        self._received_frame = step.frame
        if self._received_frame - self._acked_frame >= ACK_FRAMES:
            self._acknowledge()

    def _take_load(self, engine_id: int, load: common_pb2.Load) -> None:
        engine = self._engines.get(engine_id)
        if engine is None:
            return
        was_busy = _is_busy(engine.load)
        engine.load.CopyFrom(load)
        if was_busy != _is_busy(load):
            # Loads go on at the next beat, but who reads a stream or has got an answer may look at
            # once what runs.
            self._on_change()

    def _deliver(self, step: scheduler_pb2.StepFrame) -> None:
        """Hand the columns of a step to their handles, each end together with its last tokens."""
        ends = {message.handle: finished_from_message(message) for message in step.finished}
        # Merged frames may name a handle twice: its end goes with the last mention.
        last_mention = {handle: i for i, handle in enumerate(step.handle)} if ends else {}
        logprobs = LogprobReader(step.logprobs)
        token_ids = step.token_ids
        start = 0
        for i, (handle, offset, num_tokens) in enumerate(
            zip(step.handle, step.offset, step.count, strict=True)
        ):
            stop = start + num_tokens
            is_last = last_mention.get(handle) == i
            kept = self._handles.step(
                handle,
                token_ids[start:stop],
                offset=offset,
                logprobs=logprobs.take(start, stop),
                finished=ends.pop(handle, None) if is_last else None,
            )
            if kept is not None:
                self._send(abort_to_message([handle], AbortReason.STOP_STRING, kept_tokens=[kept]))
            start = stop
        for handle, finished in ends.items():
            self._handles.step(handle, [], finished=finished)

    # --- writing ---

    def _send(self, frame: scheduler_pb2.ClientFrame) -> None:
        self._outbox.append(frame)
        self._outbox_filled.set()

    def _acknowledge(self) -> None:
        self._acked_frame = self._received_frame
        ack = scheduler_pb2.FrameAck(frame=self._received_frame)
        self._send(scheduler_pb2.ClientFrame(ack=ack))

    async def _write(self, call: Call) -> NoReturn:
        try:
            while True:
                await self._outbox_filled.wait()
                while self._outbox:
                    await call.write(self._outbox.popleft())
                    self._sent_at = time.monotonic()
                self._outbox_filled.clear()
        except grpc.aio.AioRpcError as error:
            raise self._broken(translate(error).message) from None
        except asyncio.InvalidStateError:
            raise self._broken("the stream has ended") from None

    # --- time ---

    async def _keep_time(self) -> NoReturn:
        """Acknowledge, send heartbeats, and notice that the scheduler is silent."""
        judge_from = 0.0
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - before > TICK_S + LATE_LOOP_S:
                # Our own loop stood still: frames may be waiting that were sent in time.
                judge_from = now + HEARTBEAT_S
            if now - self._heard_at > self._silence_s and now >= judge_from:
                raise self._broken(f"it has been silent for {now - self._heard_at:.1f} s")
            if self._received_frame > self._acked_frame:
                self._acknowledge()
            elif now - self._sent_at >= HEARTBEAT_S - TICK_S / 2 and not self._outbox:
                self._send(scheduler_pb2.ClientFrame(heartbeat=worker_pb2.Heartbeat()))

    def _broken(self, why: str) -> WorkerLost:
        return WorkerLost(f"the session with the scheduler at {self.address} broke: {why}")


class TokenStream:
    """A submitted request, inside the ``async with`` that submitted it."""

    def __init__(self, session: Session, handles: Sequence[int]) -> None:
        self._session = session
        self._handles = handles

    def abort(self, reason: AbortReason) -> None:
        """Give up every choice that has not ended; its receiver still hears of its end."""
        self._session.abort(self._handles, reason)


def _is_busy(load: common_pb2.Load) -> bool:
    return load.running > 0 or load.waiting > 0
