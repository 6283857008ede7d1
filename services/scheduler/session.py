"""One tokenizer's Session: its handles, what it is told, and how far it has read.

Every handle ends in exactly one ``finished``, also after an Abort; a Session that breaks ends all
its handles. Nothing that an engine puts in here waits for the network (see ``outbox`` and
``stream_writer``).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from services.common.convert import error_to_message
from services.common.errors import InvalidRequest, SluicewayError, Unavailable
from services.common.pb import common_pb2
from services.common.pb import scheduler_pb2 as pb
from services.common.rpc import PROTOCOL
from services.common.telemetry import get_logger
from services.scheduler import convert, metrics
from services.scheduler.attachment import Attachment
from services.scheduler.core.output import AbortReason, Finished, LoadSnapshot
from services.scheduler.fleet import Fleet
from services.scheduler.liveness import Pulse
from services.scheduler.lives import HandleEvent
from services.scheduler.outbox import Outbox
from services.scheduler.protocol import require_protocol
from services.scheduler.stream_writer import StreamWriter
from services.scheduler.ticket import Ticket

log = get_logger(__name__)


class Session:
    """Takes one tokenizer's frames and writes its scheduler's.

    A ``ServedStream``, a ``Sink`` for tickets and an ``Audience`` of the fleet.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        wall: convert.WallClock,
        describe: Callable[[Attachment], common_pb2.EngineState],
    ) -> None:
        """
        Args:
            fleet: Where requests go.
            wall: For timestamps.
            describe: Shows an engine to the client.
        """
        self._fleet = fleet
        self._wall = wall
        self._describe = describe
        self._pulse = Pulse(now=time.monotonic())
        self._outbox = Outbox()
        self._writer: StreamWriter[pb.ServerFrame] = StreamWriter(
            self._outbox.take, heartbeat=self._heartbeat
        )
        self._tickets: dict[int, Ticket] = {}
        self._session_id: str | None = None
        self._text_fp = ""
        self._has_ended = False
        self._handlers: dict[str, Callable[[pb.ClientFrame], None]] = {
            "add": self._on_add,
            "abort": self._on_abort,
            "ack": self._on_ack,
            "heartbeat": self._on_heartbeat,
        }

    @property
    def num_handles(self) -> int:
        """Handles that have not ended."""
        return len(self._tickets)

    # The stream

    def frames(self) -> AsyncGenerator[pb.ServerFrame, None]:
        """What is written to the client, until the stream is closed."""
        return self._writer.frames()

    def on_frame(self, frame: pb.ClientFrame) -> None:
        """Take one frame of the client; what comes after the end is dropped.

        Raises:
            InvalidRequest: It breaks the protocol; the Session must end.
        """
        if self._has_ended:
            return
        self._pulse.beat(time.monotonic())
        kind = frame.WhichOneof("frame")
        if self._session_id is None:
            if kind != "hello":
                raise InvalidRequest(f"the first frame must be a hello, not {kind}")
            self._on_hello(frame.hello)
        elif kind in self._handlers:
            self._handlers[kind](frame)
        else:
            raise InvalidRequest(f"a {kind} frame cannot come now")

    def end(self, error: SluicewayError | None) -> None:
        """End the stream and all handles. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self._fleet.leave(self)
        for ticket in list(self._tickets.values()):
            ticket.life.move(HandleEvent.SESSION_LOST)
            self._fleet.abort(ticket, reason=AbortReason.CLIENT_GONE)
        self._tickets.clear()
        self._writer.close(error)
        if self._session_id is not None:
            log.info(
                "session_ended",
                session_id=self._session_id,
                reason=error.message if error is not None else "the client left",
            )

    def judge(self, now: float) -> None:
        """End a Session whose client is silent or too far behind."""
        if self._has_ended:
            return
        if self._pulse.is_dead(now):
            metrics.SESSIONS_CLOSED.labels("silent").inc()
            self.end(Unavailable(f"no frame for {self._pulse.silent_s(now):.1f} s"))
            return
        complaint = self._outbox.complaint(now)
        if complaint is not None:
            metrics.SESSIONS_CLOSED.labels("behind").inc()
            self.end(Unavailable(complaint))

    # What the client says

    def _on_hello(self, hello: pb.SessionHello) -> None:
        require_protocol(hello.protocol, of=f"session {hello.session_id}")
        self._session_id = hello.session_id
        self._text_fp = hello.text_fp
        log.info("session_opened", session_id=hello.session_id)
        engines = [self._describe(attachment) for attachment in self._fleet.attachments()]
        welcome = pb.SessionWelcome(protocol=PROTOCOL, engines=engines)
        self._tell(pb.ServerFrame(welcome=welcome))
        self._fleet.join(self)

    def _on_add(self, frame: pb.ClientFrame) -> None:
        add = frame.add
        handles = [choice.handle for choice in add.choices]
        if len(set(handles)) != len(handles) or any(h in self._tickets for h in handles):
            raise InvalidRequest(f"handles must never be used twice in a Session, got {handles}")
        try:
            submission = convert.submission_from_message(add, text_fp=self._text_fp)
        except SluicewayError as error:
            self._refuse(handles, error)
            return
        for ticket in self._fleet.make_tickets(submission, self):
            self._tickets[ticket.handle] = ticket
        self._fleet.submit([self._tickets[handle] for handle in handles])

    def _on_abort(self, frame: pb.ClientFrame) -> None:
        reason = convert.abort_reason_from_message(frame.abort.reason)
        kept = frame.abort.kept_tokens
        if kept and len(kept) != len(frame.abort.handle):
            raise InvalidRequest("an Abort needs a kept_tokens per handle, or none")
        for index, handle in enumerate(frame.abort.handle):
            ticket = self._tickets.get(handle)
            if ticket is not None:
                kept_tokens = kept[index] if kept else None
                self._fleet.abort(ticket, reason=reason, kept_tokens=kept_tokens)

    def _on_ack(self, frame: pb.ClientFrame) -> None:
        self._outbox.acknowledge(frame.ack.frame)
        self._writer.wake()

    def _on_heartbeat(self, frame: pb.ClientFrame) -> None:
        """Every frame is a sign of life; this one is nothing else."""

    # What tickets are told

    def queued(self, ticket: Ticket, *, position: int, eta_s: float | None) -> None:
        """See ``Sink``."""
        self._outbox.queued(ticket.handle, position=position, eta_ms=int((eta_s or 0.0) * 1000))
        self._writer.wake()

    def tokens(
        self,
        ticket: Ticket,
        *,
        engine_id: int,
        step: int,
        offset: int,
        token_ids: Sequence[int],
        logprobs: object | None,
    ) -> None:
        """See ``Sink``."""
        frame = self._outbox.step_frame(engine_id, step=step)
        start = frame.append_row(ticket.handle, offset=offset, token_ids=token_ids)
        if logprobs is not None:
            frame.append_logprobs(cast(common_pb2.Logprobs, logprobs), start=start)

    def prompt_logprobs(self, ticket: Ticket, *, engine_id: int, step: int, chunk: object) -> None:
        """See ``Sink``."""
        message = self._outbox.step_frame(engine_id, step=step).message
        copy = message.prompt_logprobs.add()
        copy.CopyFrom(cast(common_pb2.PromptLogprobs, chunk))
        copy.handle = ticket.handle

    def finished(self, ticket: Ticket, *, engine_id: int, step: int, finished: Finished) -> None:
        """See ``Sink``."""
        del self._tickets[ticket.handle]
        frame = self._outbox.step_frame(engine_id, step=step)
        message = frame.message.finished.add(handle=ticket.handle)
        convert.finished_to_message(finished, message, clock=self._wall)
        if ticket.decision is not None:
            decision = convert.decision_to_message(ticket.decision, finished=finished)
            message.life.decision.CopyFrom(decision)

    def flush(self, engine_id: int, load: LoadSnapshot | None) -> None:
        """See ``Sink``."""
        if load is not None:
            convert.load_to_message(load, self._outbox.step_frame(engine_id, step=0).message.load)
        self._writer.wake()

    # What engines do

    def engine_up(self, attachment: Attachment) -> None:
        """See ``Audience``."""
        self._tell(pb.ServerFrame(engine_up=pb.EngineUp(engine=self._describe(attachment))))

    def engine_down(self, engine_id: int, reason: str) -> None:
        """See ``Audience``."""
        self._outbox.engine_ended(engine_id)
        self._tell(pb.ServerFrame(engine_down=pb.EngineDown(engine_id=engine_id, reason=reason)))

    def _refuse(self, handles: Sequence[int], error: SluicewayError) -> None:
        """End handles that were never tickets."""
        frame = self._outbox.step_frame(0, step=0).message
        for handle in handles:
            message = frame.finished.add(handle=handle, reason=common_pb2.FINISH_REASON_ERROR)
            message.error.CopyFrom(error_to_message(error))
        self._writer.wake()

    def _tell(self, frame: pb.ServerFrame) -> None:
        self._outbox.control(frame)
        self._writer.wake()

    def _heartbeat(self) -> pb.ServerFrame:
        engines = [self._describe(attachment) for attachment in self._fleet.attachments()]
        return pb.ServerFrame(heartbeat=pb.ServerHeartbeat(engines=engines))
