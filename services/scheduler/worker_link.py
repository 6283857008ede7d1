"""One Attach stream: from a worker's Hello to the end of its engine.

Frames become calls on the fleet and the engine; what they say becomes frames in an outbox with its
own writer. Declaring an engine dead *is* ending its stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

from services.common.convert import constraint_to_message, error_from_message
from services.common.errors import InvalidRequest, SluicewayError, WorkerLost
from services.common.pb import worker_pb2 as pb
from services.common.rpc import PROTOCOL
from services.common.sampling import Constraint
from services.common.telemetry import get_logger
from services.scheduler import convert
from services.scheduler.attachment import Attachment
from services.scheduler.core.output import StepPlan
from services.scheduler.fleet import Fleet
from services.scheduler.liveness import Pulse
from services.scheduler.protocol import require_protocol
from services.scheduler.stream_writer import StreamWriter

log = get_logger(__name__)


class WorkerLink:
    """Takes one worker's frames and writes its engine's.

    A ``ServedStream`` and a ``WorkerStream``.
    """

    def __init__(self, fleet: Fleet) -> None:
        """
        Args:
            fleet: Where the worker attaches.
        """
        self._fleet = fleet
        self._pulse = Pulse(now=time.monotonic())
        self._outbox: deque[pb.EngineFrame] = deque()
        self._writer: StreamWriter[pb.EngineFrame] = StreamWriter(self._take, heartbeat=_heartbeat)
        self._attachment: Attachment | None = None
        self._handlers: dict[str, Callable[[Attachment, pb.WorkerFrame], None]] = {
            "loading": self._on_loading,
            "ready": self._on_ready,
            "step_result": self._on_step_result,
            "prepared": self._on_prepared,
            "heartbeat": self._on_heartbeat,
            "drained": self._on_drained,
        }

    # What the engine says

    def send_step(self, plan: StepPlan) -> None:
        """Send a step; it is never recalled."""
        self._put(pb.EngineFrame(step=convert.plan_to_bytes(plan)))

    def prepare(self, ref: int, constraint: Constraint) -> None:
        """Have the worker compile a grammar."""
        grammar = constraint_to_message(constraint)
        self._put(pb.EngineFrame(prepare=pb.Prepare(ref=ref, grammar=grammar)))

    def release(self, ref: int) -> None:
        """The worker may drop a grammar."""
        self._put(pb.EngineFrame(release=pb.ReleasePrepared(ref=[ref])))

    def drain(self) -> None:
        """Nothing more will be sent: the worker may leave."""
        self._put(pb.EngineFrame(drain=pb.DrainWorker()))

    def close(self, error: SluicewayError | None = None) -> None:
        """End the stream; ``None`` = well."""
        self._writer.close(error)

    # The stream

    def frames(self) -> AsyncGenerator[pb.EngineFrame, None]:
        """What is written to the worker, until the stream is closed."""
        return self._writer.frames()

    def on_frame(self, frame: pb.WorkerFrame) -> None:
        """Take one frame of the worker; what comes after the end is dropped.

        Raises:
            SluicewayError: It breaks the protocol, or the worker is refused; the stream must end.
        """
        if self._writer.is_closed:
            return
        self._pulse.beat(time.monotonic())
        kind = frame.WhichOneof("frame")
        if self._attachment is None:
            if kind != "hello":
                raise InvalidRequest(f"the first frame must be a hello, not {kind}")
            self._on_hello(frame.hello)
        elif kind in self._handlers:
            self._handlers[kind](self._attachment, frame)
        else:
            raise InvalidRequest(f"a {kind} frame cannot come now")

    def end(self, error: SluicewayError | None) -> None:
        """End the stream and with it the engine. Idempotent."""
        reason = error.message if error is not None else "the worker ended its stream"
        if error is not None and self._attachment is None and not self._writer.is_closed:
            log.warning("worker_refused", reason=reason)
            self._put(pb.EngineFrame(welcome=pb.EngineWelcome(protocol=PROTOCOL, refused=reason)))
        self._writer.close(error)
        if self._attachment is not None:
            self._fleet.detach(self._attachment, reason=reason)

    def judge(self, now: float) -> None:
        """Give up a worker that has been silent for too long; one that loads may be silent."""
        attachment = self._attachment
        if attachment is not None and attachment.is_loading:
            return
        if self._pulse.is_dead(now):
            self.end(WorkerLost(f"no frame for {self._pulse.silent_s(now):.1f} s"))

    def _on_hello(self, hello: pb.WorkerHello) -> None:
        require_protocol(hello.protocol, of=f"worker {hello.worker_id}")
        self._attachment = self._fleet.attach(convert.identity_from_message(hello), self)
        if hello.HasField("loading"):
            self._fleet.on_loading(self._attachment, convert.loading_from_message(hello.loading))
        self._put(pb.EngineFrame(welcome=pb.EngineWelcome(protocol=PROTOCOL)))

    def _on_loading(self, attachment: Attachment, frame: pb.WorkerFrame) -> None:
        self._fleet.on_loading(attachment, convert.loading_from_message(frame.loading))

    def _on_ready(self, attachment: Attachment, frame: pb.WorkerFrame) -> None:
        self._fleet.on_ready(attachment, convert.facts_from_message(frame.ready.info))

    def _on_step_result(self, attachment: Attachment, frame: pb.WorkerFrame) -> None:
        outcome, side = convert.outcome_from_bytes(frame.step_result)
        attachment.running_engine().on_result(outcome, side)

    def _on_prepared(self, attachment: Attachment, frame: pb.WorkerFrame) -> None:
        failed = frame.prepared.HasField("error")
        error = error_from_message(frame.prepared.error) if failed else None
        attachment.running_engine().on_prepared(frame.prepared.ref, error)

    def _on_heartbeat(self, attachment: Attachment, frame: pb.WorkerFrame) -> None:
        """Every frame is a sign of life; this one is nothing else."""

    def _on_drained(self, attachment: Attachment, frame: pb.WorkerFrame) -> None:
        self._fleet.on_drained(attachment)

    def _put(self, frame: pb.EngineFrame) -> None:
        self._outbox.append(frame)
        self._writer.wake()

    def _take(self, now: float) -> pb.EngineFrame | None:
        return self._outbox.popleft() if self._outbox else None


def _heartbeat() -> pb.EngineFrame:
    return pb.EngineFrame(heartbeat=pb.Heartbeat())
