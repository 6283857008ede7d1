"""All engines of this scheduler, and which of them answers for which request.

Places requests, moves those that wait, and finds a new place (or an end) for those whose engine is
lost. Every ticket ends in exactly one finish. Knows neither protobuf nor gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from services.common.errors import (
    InvalidRequest,
    ModelNotFound,
    RequestFailed,
    SluicewayError,
    Unavailable,
    WorkerLost,
)
from services.common.placement import Place, choose_place
from services.common.telemetry import get_logger
from services.scheduler import metrics
from services.scheduler.attachment import Attachment, WorkerStream
from services.scheduler.core.output import AbortReason, Finished, FinishReason, Life, Usage
from services.scheduler.core.request import Request
from services.scheduler.engine import Engine, EnginePolicy
from services.scheduler.kv_events import KvPublisher
from services.scheduler.kv_feed import EngineCard
from services.scheduler.lives import EngineEvent, EngineState, HandleEvent
from services.scheduler.request_log import RequestLog
from services.scheduler.submission import ChoiceSpec, Submission
from services.scheduler.ticket import Decision, Sink, Ticket
from services.scheduler.worker_profile import LoadingProgress, WorkerFacts, WorkerIdentity

MAX_CRASHES = 3
"""A request under which this many engines have died is not run again."""

RETRY_AFTER_S = 1.0
POSITIONS_PERIOD_S = 1.0

log = get_logger(__name__)


class Audience(Protocol):
    """Who is told that engines come and go: a Session."""

    def engine_up(self, attachment: Attachment) -> None:
        """An engine has attached, or stands elsewhere than before."""

    def engine_down(self, engine_id: int, reason: str) -> None:
        """An engine has ended."""


class Fleet:
    """The engines by id, the requests by id, and everybody who watches.

    Attributes:
        changed: Set whenever readiness or progress may have changed.
        requests: What has been asked of this scheduler.
        is_draining: New requests are refused.
        address: Under what tokenizers reach this scheduler.
    """

    def __init__(
        self,
        *,
        tasks: asyncio.TaskGroup,
        policy: EnginePolicy,
        publisher: KvPublisher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            tasks: Engines run in it.
            policy: Settings for all engines.
            publisher: Where block events go.
            clock: Monotonic seconds.
        """
        self.changed = asyncio.Event()
        self.requests = RequestLog()
        self.is_draining = False
        self.address = ""
        self._tasks = tasks
        self._policy = policy
        self._publisher = publisher
        self._now = clock
        self._attachments: dict[int, Attachment] = {}
        self._engine_of: dict[Ticket, Engine] = {}
        self._audience: set[Audience] = set()
        self._emptied = asyncio.Event()
        self._was_progressing = True
        self._told_positions_at = 0.0

    # What is there

    @property
    def is_ready(self) -> bool:
        """Whether a request would succeed."""
        return not self.is_draining and any(a.is_ready for a in self._attachments.values())

    @property
    def is_progressing(self) -> bool:
        """Whether steps advance while there is work."""
        now = self._now()
        return not any(_is_stalled(engine, now) for engine in self._engines())

    @property
    def num_tickets(self) -> int:
        """Choices that have not ended."""
        return len(self._engine_of)

    @property
    def num_sessions(self) -> int:
        """Sessions that are told of engines."""
        return len(self._audience)

    def attachments(self) -> list[Attachment]:
        """All workers that are attached."""
        return list(self._attachments.values())

    def find_worker(self, worker_id: str) -> Attachment | None:
        """The attachment of a worker."""
        for attachment in self._attachments.values():
            if attachment.identity.worker_id == worker_id:
                return attachment
        return None

    def join(self, audience: Audience) -> None:
        """Tell a Session of engines from now on."""
        self._audience.add(audience)

    def leave(self, audience: Audience) -> None:
        """Tell it no more."""
        self._audience.discard(audience)

    # What workers do

    def attach(self, identity: WorkerIdentity, stream: WorkerStream) -> Attachment:
        """A worker has said Hello; its older attachment, if there is one, ends at once.

        Raises:
            InvalidRequest: The engine_id is missing or has been used.
        """
        if identity.engine_id == 0 or identity.engine_id in self._attachments:
            raise InvalidRequest(
                f"worker {identity.worker_id} attached with engine_id {identity.engine_id}, which "
                "is 0 or in use: every attachment needs one of its own",
                param="engine_id",
            )
        older = self.find_worker(identity.worker_id)
        if older is not None:
            self.detach(older, reason="the worker attached again")
        attachment = Attachment(identity, stream)
        self._attachments[identity.engine_id] = attachment
        log.info(
            "worker_attached",
            worker_id=identity.worker_id,
            engine_id=identity.engine_id,
            model=identity.model,
        )
        self._announce(attachment)
        return attachment

    def on_loading(self, attachment: Attachment, progress: LoadingProgress) -> None:
        """A worker has got further with loading."""
        attachment.loading = progress

    def on_ready(self, attachment: Attachment, facts: WorkerFacts) -> None:
        """A worker can run steps; its cache is empty.

        Raises:
            InvalidRequest: It has been ready before.
            ConfigError: Its sizes make no sense together.
        """
        if attachment.engine is not None:
            raise InvalidRequest(
                f"worker {attachment.identity.worker_id} is ready for a second time"
            )
        engine = Engine(
            attachment.identity,
            facts,
            link=attachment.stream,
            policy=self._policy,
            publisher=self._publisher,
            on_finished=self._on_finished,
            clock=self._now,
        )
        attachment.engine = engine
        attachment.loading = None
        if not attachment.life.allows(EngineEvent.LOADED):
            return  # it was asked to drain while it loaded
        attachment.life.move(EngineEvent.LOADED)
        attachment.runner = self._tasks.create_task(self._run(attachment, engine))
        card = _card(attachment.identity, facts, address=self.address)
        self._publisher.engine_up(card, published_keys=engine.published_keys)
        log.info(
            "engine_ready",
            worker_id=attachment.identity.worker_id,
            engine_id=attachment.engine_id,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
        )
        self._announce(attachment)

    def on_drained(self, attachment: Attachment) -> None:
        """A worker says that it is empty; if nobody has asked, it wants to leave."""
        if attachment.is_drain_sent:
            self.detach(attachment, reason="drained")
        else:
            self.drain_engine(attachment)

    def detach(self, attachment: Attachment, *, reason: str) -> None:
        """End an engine and its stream; its requests are placed again or end. Idempotent."""
        if self._attachments.pop(attachment.engine_id, None) is None:
            return
        was_drained = attachment.is_drain_sent
        attachment.life.move(EngineEvent.END)
        attachment.stream.close(None if was_drained else WorkerLost(reason))
        if attachment.runner is not None:
            attachment.runner.cancel()
        log.info("engine_gone", engine_id=attachment.engine_id, reason=reason)
        self._publisher.engine_down(attachment.engine_id)
        for audience in self._audience:
            audience.engine_down(attachment.engine_id, reason)
        self._signal()
        if not was_drained:
            metrics.LOST_ENGINES.inc()
        if attachment.engine is not None:
            self._place_again(attachment.engine.lose(), cause="engine_lost", reason=reason)

    # What Sessions do

    def make_tickets(self, submission: Submission, sink: Sink) -> list[Ticket]:
        """A ticket per choice; give them to ``submit``."""
        now = self._now()
        return [
            Ticket(choice.handle, submission, _request(submission, choice, now=now), sink)
            for choice in submission.choices
        ]

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Take all tickets of one submission; refused or not, each gets its one finish."""
        metrics.REQUESTS.inc(len(tickets))
        try:
            self._admit(tickets)
        except SluicewayError as error:
            self._end_all(tickets, error)

    def abort(self, ticket: Ticket, *, reason: AbortReason, kept_tokens: int | None = None) -> None:
        """End a ticket; the sink is told at once. One that has ended stays as it is."""
        if ticket.life.allows(HandleEvent.ABORT):
            ticket.life.move(HandleEvent.ABORT)
        engine = self._engine_of.get(ticket)
        if engine is not None:
            engine.abort(ticket, reason=reason, kept_tokens=kept_tokens)

    # Drain

    def drain_all(self) -> int:
        """Refuse new requests; those that are here finish in place.

        Returns:
            The number of engines that are draining now.
        """
        self.is_draining = True
        for attachment in self.attachments():
            self.drain_engine(attachment)
        self._signal()
        return len(self._attachments)

    def drain_engine(self, attachment: Attachment) -> None:
        """Place nothing more on an engine; what waits moves, what runs finishes. Idempotent."""
        if not attachment.life.allows(EngineEvent.DRAIN):
            return
        attachment.life.move(EngineEvent.DRAIN)
        log.info("engine_draining", engine_id=attachment.engine_id)
        self._announce(attachment)
        if attachment.engine is not None and not self.is_draining:
            self._move_waiting(attachment.engine)
        self._settle_drain(attachment)

    async def wait_until_empty(self) -> None:
        """Wait until every choice has ended."""
        while self._engine_of:
            self._emptied.clear()
            await self._emptied.wait()

    def abandon_all(self, reason: str) -> None:
        """End whatever is left with an error that the clients resume on."""
        self.is_draining = True  # nothing moves from one ending engine to the next
        for attachment in self.attachments():
            self.detach(attachment, reason=reason)

    # What time does

    def tick(self) -> None:
        """Look for stalled engines, drained ones, and idle ones that could run what waits."""
        now = self._now()
        for attachment in self.attachments():
            if attachment.engine is not None:
                self._judge_stall(attachment, attachment.engine, now)
            self._settle_drain(attachment)
        self._balance()
        self._tell_positions(now)
        if self.is_progressing is not self._was_progressing:
            self._was_progressing = self.is_progressing
            self._signal()
        for state in EngineState:
            count = sum(a.state is state for a in self._attachments.values())
            metrics.ENGINES.labels(state.name.lower()).set(count)

    # Placement

    def _admit(self, tickets: Sequence[Ticket]) -> None:
        if not tickets:
            return
        submission = tickets[0].submission
        superseded = self.requests.open_attempt(submission.request_id, submission.attempt)
        for ticket in tickets:
            self.requests.enter(ticket)
        for old in superseded:
            self.abort(old, reason=AbortReason.SUPERSEDED)
        self._place(tickets)

    def _place(self, tickets: Sequence[Ticket]) -> None:
        """Put all choices of one request on the best engine that takes them.

        Raises:
            SluicewayError: There is none, or all refuse; the tickets are nowhere.
        """
        engines = self._candidates(tickets[0].submission)
        while True:
            best = self._choose(engines, tickets)
            try:
                self._put(tickets, best)
                return
            except SluicewayError:
                engines.remove(best)  # another may be larger, or have a shorter queue
                if not engines:
                    raise

    def _put(self, tickets: Sequence[Ticket], engine: Engine) -> None:
        engine.add(tickets)
        for ticket in tickets:
            if not ticket.has_ended:
                self._engine_of[ticket] = engine

    def _candidates(self, submission: Submission) -> list[Engine]:
        if self.is_draining:
            raise Unavailable("this scheduler is draining", retry_after_s=RETRY_AFTER_S)
        ready = [
            a.engine for a in self._attachments.values() if a.is_ready and a.engine is not None
        ]
        if not ready:
            raise Unavailable(self._why_not_ready(), retry_after_s=RETRY_AFTER_S)
        readable = [e for e in ready if submission.text_fp in ("", e.identity.text_fp)]
        if not readable:
            theirs = sorted({engine.identity.text_fp for engine in ready})
            raise Unavailable(
                f"the tokenizer's text fingerprint is {submission.text_fp}, that of the workers "
                f"{', '.join(theirs)}: they serve different models",
                retry_after_s=RETRY_AFTER_S,
            )
        served = [e for e in readable if submission.model in ("", e.identity.model)]
        if not served:
            names = sorted({engine.identity.model for engine in readable})
            raise ModelNotFound(
                f"model {submission.model!r} is not served here; there is {', '.join(names)}",
                param="model",
            )
        return served

    def _why_not_ready(self) -> str:
        if not self._attachments:
            return "no worker is attached to the scheduler"
        states = sorted({a.state.name.lower() for a in self._attachments.values()})
        return f"no worker is ready: {', '.join(states)}"

    def _choose(self, engines: Sequence[Engine], tickets: Sequence[Ticket]) -> Engine:
        request = tickets[0].request
        places = [_place_of(engine, cached=engine.cached_tokens(tickets[0])) for engine in engines]
        choice = choose_place(places, num_tokens=request.num_tokens)
        decision = Decision(
            engine_ids=tuple(place.place_id for place in places),
            cached_tokens=tuple(place.cached_tokens for place in places),
            costs_s=choice.costs_s,
            chosen_engine_id=choice.place_id,
            wait_s=choice.wait_s,
        )
        for ticket in tickets:
            ticket.decision = decision
        return next(engine for engine in engines if engine.engine_id == choice.place_id)

    def _place_again(self, tickets: Iterable[Ticket], *, cause: str, reason: str) -> None:
        groups: dict[int, list[Ticket]] = {}
        for ticket in tickets:
            groups.setdefault(id(ticket.submission), []).append(ticket)
        for group in groups.values():
            self._place_group_again(group, cause=cause, reason=reason)

    def _place_group_again(self, tickets: list[Ticket], *, cause: str, reason: str) -> None:
        for ticket in tickets:
            self._engine_of.pop(ticket, None)
        try:
            if max(ticket.request.crashes for ticket in tickets) >= MAX_CRASHES:
                raise RequestFailed(f"{MAX_CRASHES} engines have died while they ran this request")
            self._place(tickets)
            metrics.MOVED_REQUESTS.labels(cause).inc(len(tickets))
        except RequestFailed as error:
            self._end_all(tickets, error)
        except SluicewayError as error:
            lost = WorkerLost(f"{reason}; it cannot go on elsewhere: {error.message}")
            self._end_all(tickets, lost)

    def _move_waiting(self, engine: Engine) -> None:
        for ticket in engine.tickets():
            if self._other_ready(engine) and engine.withdraw(ticket):
                self._hand_over(ticket, source=engine, place=self._place, cause="drain")

    def _other_ready(self, engine: Engine) -> bool:
        """Whether another engine could run the requests of this one."""
        return any(e is not engine and _same_kind(e, engine) for e in self._engines(ready=True))

    def _balance(self) -> None:
        """Move waiting requests to engines that could run them at once."""
        engines = self._engines(ready=True)
        if len(engines) < 2:
            return
        for source in engines:
            # The last in the queue gains most by leaving it.
            for ticket in reversed(source.waiting_tickets()):
                target = next((e for e in engines if _has_room(e) and _same_kind(e, source)), None)
                if target is None:
                    break
                if source.withdraw(ticket):
                    place = partial(self._put, engine=target)
                    self._hand_over(ticket, source=source, place=place, cause="balance")

    def _hand_over(
        self,
        ticket: Ticket,
        *,
        source: Engine,
        place: Callable[[Sequence[Ticket]], None],
        cause: str,
    ) -> None:
        """Place a withdrawn ticket; one that nobody else takes goes back to where it waited."""
        self._engine_of.pop(ticket, None)
        try:
            place([ticket])
        except SluicewayError as refusal:
            self._put_back(ticket, source, refusal)
        else:
            metrics.MOVED_REQUESTS.labels(cause).inc()

    def _put_back(self, ticket: Ticket, source: Engine, refusal: SluicewayError) -> None:
        try:
            self._put([ticket], source)
        except SluicewayError:  # those that were preempted have filled its queue
            self._end(ticket, refusal)

    # Ends

    def _end_all(self, tickets: Iterable[Ticket], error: SluicewayError) -> None:
        for ticket in tickets:
            self._end(ticket, error)

    def _end(self, ticket: Ticket, error: SluicewayError) -> None:
        """Finish a ticket that no engine holds."""
        if ticket.has_ended:
            return
        finished = _failure(ticket, error, now=self._now())
        ticket.life.move(HandleEvent.FINISH)
        ticket.sink.finished(ticket, engine_id=0, step=0, finished=finished)
        ticket.sink.flush(0, None)
        self._on_finished(ticket, finished)

    def _on_finished(self, ticket: Ticket, finished: Finished) -> None:
        self._engine_of.pop(ticket, None)
        if not self._engine_of:
            self._emptied.set()
        self.requests.end(ticket, finished)
        metrics.FINISHED.labels(finished.reason.name.lower()).inc()

    # Engines

    def _engines(self, *, ready: bool = False) -> list[Engine]:
        return [
            a.engine
            for a in self._attachments.values()
            if a.engine is not None and (a.is_ready or not ready)
        ]

    async def _run(self, attachment: Attachment, engine: Engine) -> None:
        """The one boundary where an engine's failure is reported: it costs that engine only."""
        try:
            await engine.run()
        except Exception as error:
            log.error("engine_failed", engine_id=engine.engine_id, exc_info=error)
            self.detach(attachment, reason=f"its engine failed: {error}")

    def _judge_stall(self, attachment: Attachment, engine: Engine, now: float) -> None:
        is_stalled = _is_stalled(engine, now)
        if is_stalled and self._other_ready(engine):
            # Its requests can go on elsewhere, so it is given up: the worker comes back as a new
            # engine.
            self.detach(attachment, reason=f"a step has run for {engine.step_age_s():.0f} s")
        elif is_stalled and attachment.life.allows(EngineEvent.STALL):
            attachment.life.move(EngineEvent.STALL)
            log.warning(
                "engine_stalled",
                engine_id=engine.engine_id,
                step_age_s=round(engine.step_age_s(), 1),
            )
            self._announce(attachment)
        elif not is_stalled and attachment.life.allows(EngineEvent.RECOVER):
            attachment.life.move(EngineEvent.RECOVER)
            log.info("engine_recovered", engine_id=engine.engine_id)
            self._announce(attachment)

    def _settle_drain(self, attachment: Attachment) -> None:
        """Let a draining worker leave once it has nothing left to do."""
        if attachment.state is not EngineState.DRAINING or attachment.is_drain_sent:
            return
        if attachment.engine is None or attachment.engine.is_idle:
            attachment.is_drain_sent = True
            attachment.stream.drain()

    def _tell_positions(self, now: float) -> None:
        """Tell those that wait where they stand, once a second."""
        if now - self._told_positions_at < POSITIONS_PERIOD_S:
            return
        self._told_positions_at = now
        for engine in self._engines():
            for ticket in engine.waiting_tickets():
                engine.tell_position(ticket)

    def _announce(self, attachment: Attachment) -> None:
        for audience in self._audience:
            audience.engine_up(attachment)
        self._signal()

    def _signal(self) -> None:
        self.changed.set()


def _request(submission: Submission, choice: ChoiceSpec, *, now: float) -> Request:
    return Request(
        handle=0,
        request_id=submission.request_id,
        choice=choice.index,
        prompt_ids=submission.prompt_ids,
        resume_ids=choice.resume_ids,
        sampling=submission.sampling,
        root_key=b"",
        arrival_s=now,
        priority=submission.priority,
        deadline_s=None if submission.deadline_s is None else now + submission.deadline_s,
        attempt=submission.attempt,
        crashes=submission.crashes,
        prompt_logprobs_done=submission.prompt_logprobs_done,
        pools=submission.pools,
    )


def _place_of(engine: Engine, *, cached: int) -> Place:
    load = engine.load()
    return Place(
        place_id=engine.engine_id,
        cached_tokens=cached,
        waiting_uncached_tokens=load.waiting_uncached_tokens,
        num_running=load.running,
        num_waiting=load.waiting,
        prefill_tok_s=load.prefill_tok_s,
        decode_tok_s=load.decode_tok_s,
        max_running=engine.limits.max_num_seqs,
    )


def _has_room(engine: Engine) -> bool:
    load = engine.load()
    return load.waiting == 0 and load.running < engine.limits.max_num_seqs


def _same_kind(one: Engine, other: Engine) -> bool:
    return (one.identity.text_fp, one.identity.model) == (
        other.identity.text_fp,
        other.identity.model,
    )


def _is_stalled(engine: Engine, now: float) -> bool:
    stalls_at = engine.stalls_at()
    return stalls_at is not None and now > stalls_at


def _card(identity: WorkerIdentity, facts: WorkerFacts, *, address: str) -> EngineCard:
    return EngineCard(
        engine_id=identity.engine_id,
        worker_id=identity.worker_id,
        scheduler_address=address,
        model=identity.model,
        text_fp=identity.text_fp,
        kv_fp=identity.kv_fp,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
    )


def _failure(ticket: Ticket, error: SluicewayError, *, now: float) -> Finished:
    request = ticket.request
    return Finished(
        handle=request.handle,
        reason=FinishReason.ERROR,
        usage=Usage(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=0,
            computed_tokens=0,
            output_tokens=request.num_output_tokens,
            wasted_tokens=0,
        ),
        life=Life(
            arrival_s=request.arrival_s,
            first_scheduled_s=None,
            first_token_s=None,
            last_token_s=None,
            finished_s=now,
            num_preemptions=0,
            attempt=request.attempt,
        ),
        error=error,
    )
