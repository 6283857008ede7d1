"""A worker that is ready and the core that plans its steps: an engine.

The loop keeps up to ``pipeline_depth`` steps in flight and never waits for the network: it hands
steps to the link's outbox and results to the Sessions' outboxes. Knows neither protobuf nor gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from services.common.block_hash import root_key
from services.common.errors import SluicewayError
from services.common.sampling import Constraint
from services.common.telemetry import get_logger
from services.scheduler import metrics
from services.scheduler.core.output import (
    AbortReason,
    Finished,
    LoadSnapshot,
    QueuePosition,
    StepOutcome,
    StepPlan,
    StepUpdate,
)
from services.scheduler.core.scheduler import EngineLimits, Scheduler
from services.scheduler.kv_events import KvPublisher
from services.scheduler.lives import HandleEvent, HandleState
from services.scheduler.prepare import PreparedState, PreparedThings
from services.scheduler.step_clock import StepClock
from services.scheduler.ticket import Sink, Ticket
from services.scheduler.worker_profile import WorkerFacts, WorkerIdentity

log = get_logger(__name__)


class EngineLink(Protocol):
    """The stream to the worker; nothing here waits."""

    def send_step(self, plan: StepPlan) -> None:
        """Send a step; it is never recalled."""

    def prepare(self, ref: int, constraint: Constraint) -> None:
        """Have the worker compile a grammar."""

    def release(self, ref: int) -> None:
        """The worker may drop a grammar."""


class SideColumns(Protocol):
    """Log-probabilities that came with a result, found by the positions of the tokens."""

    def of(self, start: int, count: int) -> object | None:
        """Those of ``count`` tokens from ``start``; ``None`` if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicy:
    """What the scheduler decides for all its engines; see ``SchedulerConfig``."""

    pipeline_depth: int = 2
    enable_prefix_caching: bool = True
    max_waiting: int = 1024
    policy: Literal["fcfs", "priority"] = "fcfs"
    step_time_target_s: float = 0.0

    def limits_for(self, facts: WorkerFacts) -> EngineLimits:
        """Join the worker's sizes and these settings.

        Raises:
            ConfigError: The worker's sizes make no sense together.
        """
        return EngineLimits(
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            eos_token_ids=facts.eos_token_ids,
            vocab_size=facts.vocab_size,
            pipeline_depth=min(self.pipeline_depth, facts.pipeline_depth or self.pipeline_depth),
            enable_prefix_caching=self.enable_prefix_caching,
            max_waiting=self.max_waiting,
            policy=self.policy,
            step_time_target_s=self.step_time_target_s,
        )


class Engine:
    """Runs the requests of one ready worker.

    ``add``, ``abort`` and ``on_result`` return at once; ``run`` does the planning.

    Attributes:
        identity: Who attached.
        facts: What the worker discovered.
        limits: What the core was made with.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        facts: WorkerFacts,
        *,
        link: EngineLink,
        policy: EnginePolicy,
        publisher: KvPublisher,
        on_finished: Callable[[Ticket, Finished], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            identity: Who attached.
            facts: What the worker discovered; its cache is empty.
            link: The stream to the worker.
            policy: Settings.
            publisher: Where block events go.
            on_finished: Called for every ticket that ends here, after its sink was told.
            clock: Monotonic seconds.

        Raises:
            ConfigError: The worker's sizes make no sense together.
        """
        self.identity = identity
        self.facts = facts
        self.limits = policy.limits_for(facts)
        self._core = Scheduler(self.limits)
        self._link = link
        self._publisher = publisher
        self._on_finished = on_finished
        self._now = clock
        self._tickets: dict[int, Ticket] = {}
        self._prepared = PreparedThings()
        self._steps = StepClock()
        self._results: deque[tuple[StepOutcome, SideColumns]] = deque()
        self._wake = asyncio.Event()
        self._last_handle = 0
        self._last_step = 0

    @property
    def engine_id(self) -> int:
        """Names this one attachment."""
        return self.identity.engine_id

    @property
    def num_tickets(self) -> int:
        """Choices that this engine answers for."""
        return len(self._tickets)

    @property
    def is_idle(self) -> bool:
        """Whether the worker has nothing to do and nothing to be told."""
        return not self._tickets and not self._core.has_work and not self._core.num_in_flight

    def tickets(self) -> list[Ticket]:
        """Choices that this engine answers for, in the order they came."""
        return list(self._tickets.values())

    def waiting_tickets(self) -> list[Ticket]:
        """Tickets that have not got a token and wait, in the order they came."""
        if not self._core.load().waiting:
            return []
        return [
            ticket
            for ticket in self._tickets.values()
            if ticket.life.state is HandleState.QUEUED and self._position(ticket) is not None
        ]

    def load(self) -> LoadSnapshot:
        """State and counters."""
        return self._core.load()

    def stalls_at(self) -> float | None:
        """Monotonic time at which the oldest step in flight counts as stalled."""
        return self._steps.stalls_at()

    def step_age_s(self) -> float:
        """How long the oldest step in flight has been running, in seconds."""
        return self._steps.age_s(self._now())

    def cached_tokens(self, ticket: Ticket) -> int:
        """Tokens of a ticket, not added yet, whose KV is here."""
        ticket.request.root_key = self._root_of(ticket)
        return self._core.num_cached_tokens(ticket.request)

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Take all choices of one request, or none.

        Raises:
            SluicewayError: Why not, as ``Scheduler.add``; the tickets are untouched.
        """
        for ticket in tickets:
            self._enrol(ticket)
        try:
            self._core.add([ticket.request for ticket in tickets], now=self._now())
        except SluicewayError:
            for ticket in tickets:
                self._strike(ticket.request.handle)
            raise
        for ticket in tickets:
            if ticket.life.state is HandleState.ADDED:
                ticket.life.move(HandleEvent.ACCEPT)
                self.tell_position(ticket)
        self._tell_finished(self._core.take_finished())
        self._wake.set()

    def tell_position(self, ticket: Ticket) -> None:
        """Tell a ticket's client where it stands in the queue; one that runs stands at 0."""
        place = self._position(ticket)
        ticket.sink.queued(
            ticket,
            position=0 if place is None else place.position,
            eta_s=0.0 if place is None else place.eta_s,
        )

    def abort(self, ticket: Ticket, *, reason: AbortReason, kept_tokens: int | None) -> None:
        """End a ticket of this engine: its blocks are free and its sink is told at once."""
        self._core.abort(
            ticket.request.handle, reason=reason, kept_tokens=kept_tokens, now=self._now()
        )
        self._tell_finished(self._core.take_finished())
        self._wake.set()

    def withdraw(self, ticket: Ticket) -> bool:
        """Give a waiting ticket back, to be added elsewhere.

        Returns:
            Whether it was given back; one that holds blocks is not.
        """
        handle = ticket.request.handle
        if self._core.withdraw(handle) is None:
            return False
        self._strike(handle)
        return True

    def lose(self) -> list[Ticket]:
        """The worker is gone: give back all unfinished tickets, in order; the engine is over."""
        requests = self._core.lose_engine()
        self._tell_finished(self._core.take_finished())
        tickets = [self._tickets[request.handle] for request in requests]
        self._tickets.clear()
        return tickets

    def published_keys(self) -> bytes:
        """All keys that the block events so far amount to, 16 bytes each."""
        return self._core.published_keys()

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; false (and nothing done) while a request holds blocks."""
        done = self._core.reset_prefix_cache()
        self._publish_kv()
        return done

    def on_result(self, outcome: StepOutcome, side: SideColumns) -> None:
        """The result of the oldest step in flight has come."""
        self._results.append((outcome, side))
        self._wake.set()

    def on_prepared(self, ref: int, error: SluicewayError | None) -> None:
        """The worker has compiled a grammar, or failed to."""
        thing = self._prepared.finish(ref, error)
        if thing is None:
            return
        for handle in sorted(thing.users):
            self._core.prepared(handle, error=error, now=self._now())
        self._tell_finished(self._core.take_finished())
        self._wake.set()

    async def run(self) -> None:
        """Plan and send steps until cancelled.

        Raises:
            InvariantError: The worker's results are out of order: it must be given up.
        """
        timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                self._apply_results()
                send_at = self._send_steps()
                self._publish_kv()
                if timer is not None:
                    timer.cancel()
                delay_s = self._next_event_s(send_at)
                timer = None if delay_s is None else loop.call_later(delay_s, self._wake.set)
                await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _apply_results(self) -> None:
        while self._results:
            outcome, side = self._results.popleft()
            now = self._now()
            update = self._core.apply(outcome, now=now)
            took_s = self._steps.finished(outcome.device_s, now=now)
            metrics.STEP_SECONDS.observe(took_s)
            metrics.STEP_GAP_SECONDS.observe(outcome.gap_s)
            if outcome.failed is not None:
                metrics.FAILED_STEPS.inc()
                log.warning("step_failed", engine_id=self.engine_id, error=outcome.failed)
            self._last_step = update.step
            self._tell_update(update, side)

    def _send_steps(self) -> float | None:
        """Send what can be sent now.

        Returns:
            When the next step is due, if only time holds it back.
        """
        # First, because an end may let others run.
        self._core.expire(now=self._now())
        due_at: float | None = None
        while self._core.has_work and self._core.num_in_flight < self.limits.pipeline_depth:
            began_at = self._now()
            if self._core.num_in_flight and began_at < self._steps.send_at():
                due_at = self._steps.send_at()
                break
            plan = self._core.schedule(now=began_at)
            if plan is None:
                break
            self._link.send_step(plan)
            sent_at = self._now()
            self._steps.planned(sent_at - began_at)
            self._steps.sent(plan.predicted_s, now=sent_at)
            metrics.PLANNING_SECONDS.observe(sent_at - began_at)
            metrics.SCHEDULED_TOKENS.inc(plan.total_num_tokens)
        self._tell_finished(self._core.take_finished())
        return due_at

    def _next_event_s(self, send_at: float | None) -> float | None:
        """Seconds until something must be done though nothing has come in; ``None`` = never."""
        times = [at for at in (send_at, self._core.next_expiry()) if at is not None]
        return max(min(times) - self._now(), 0.0) if times else None

    def _publish_kv(self) -> None:
        events = self._core.take_kv_events()
        if events:
            self._publisher.publish(
                self.engine_id,
                stored=events.stored,
                removed=events.removed,
                is_cleared=events.cleared,
            )

    def _tell_update(self, update: StepUpdate, side: SideColumns) -> None:
        told: set[Sink] = set()
        start = 0
        for i, handle in enumerate(update.handles):
            ticket = self._tickets[handle]
            count = update.counts[i]
            ticket.life.move(HandleEvent.TOKENS)
            ticket.sink.tokens(
                ticket,
                engine_id=self.engine_id,
                step=update.step,
                offset=update.offsets[i],
                token_ids=update.token_ids[start : start + count],
                logprobs=side.of(update.source_starts[i], count),
            )
            start += count
            told.add(ticket.sink)
        for handle, chunk in update.prompt_logprobs:
            ticket = self._tickets[handle]
            ticket.sink.prompt_logprobs(
                ticket, engine_id=self.engine_id, step=update.step, chunk=chunk
            )
            told.add(ticket.sink)
        metrics.TOKENS.inc(len(update.token_ids))
        told |= self._end(update.finished)
        self._flush(told)

    def _tell_finished(self, finished: Iterable[Finished]) -> None:
        self._flush(self._end(finished))

    def _end(self, finished: Iterable[Finished]) -> set[Sink]:
        told: set[Sink] = set()
        for end in finished:
            ticket = self._strike(end.handle)
            if ticket.life.allows(HandleEvent.FINISH):
                ticket.life.move(HandleEvent.FINISH)
                ticket.sink.finished(
                    ticket, engine_id=self.engine_id, step=self._last_step, finished=end
                )
                told.add(ticket.sink)
            self._on_finished(ticket, end)
        return told

    def _flush(self, sinks: set[Sink]) -> None:
        if not sinks:
            return
        load = self.load()
        for sink in sinks:
            sink.flush(self.engine_id, load)

    def _position(self, ticket: Ticket) -> QueuePosition | None:
        return self._core.queue_position(ticket.request.handle, now=self._now())

    def _enrol(self, ticket: Ticket) -> None:
        self._last_handle += 1
        request = ticket.request
        request.handle = self._last_handle
        request.root_key = self._root_of(ticket)
        self._tickets[request.handle] = ticket
        constraint = ticket.submission.constraint
        if constraint is not None:
            thing, is_new = self._prepared.acquire(constraint, handle=request.handle)
            request.grammar_ref = thing.ref
            request.needs_prepare = thing.state is PreparedState.REQUESTED
            if is_new:
                self._link.prepare(thing.ref, constraint)

    def _strike(self, handle: int) -> Ticket:
        ref = self._prepared.release(handle)
        if ref is not None:
            self._link.release(ref)
        return self._tickets.pop(handle)

    def _root_of(self, ticket: Ticket) -> bytes:
        return root_key(self.facts.revision, cache_namespace=ticket.submission.cache_namespace)
