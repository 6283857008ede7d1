"""The scheduler of one engine: what runs in the next step, and what a step's result means.

There is no prefill phase and no decode phase. Each request has tokens that are known (prompt, then
output) and tokens whose KV is computed; a step lets the second count chase the first under one
token budget, running requests before waiting ones. A prompt that exceeds the budget is simply not
caught up after one step (chunked prefill). A request whose last known token is computed yields one
new token.

Steps are pipelined: the next may be planned while the values of earlier ones are unknown. A token
in flight counts as planned, so its successor can be scheduled; its value stays on the device. A
result row is fenced by (step, handle, generation): if the request has ended or was preempted since,
the row is dropped, and because draws are keyed by position the same token is drawn again. A step
sent is never recalled.

If the pool runs short the running request that ranks last gives back all its blocks and waits
again, in front of those that rank behind it; in such a step nobody is admitted. Features enter by
three doors only: ``caps`` (limit a request's tokens in this step), ``admission`` (admit, skip,
stop) and the queue policy (order and victim).

Pure: no clock, no network, no tensor. Design after vLLM V1's scheduler; batching after "Orca" (Yu
et al. 2022), chunked prefill after "Sarathi" (Agrawal et al. 2023).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from services.common.errors import InvariantError, Overloaded, SluicewayError
from services.scheduler.core.admission import (
    AdmissionRule,
    AloneRule,
    QuarantineRule,
    SeatRule,
    Verdict,
)
from services.scheduler.core.caps import Cap, LongPrefillCap, TokenBudget
from services.scheduler.core.cost_model import StepCostModel
from services.scheduler.core.counters import Counters
from services.scheduler.core.drain_rate import DrainRate
from services.scheduler.core.in_flight import InFlightStep, StepBuilder
from services.scheduler.core.intake import Intake
from services.scheduler.core.kv_cache_manager import KVCacheManager
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.output import (
    AbortReason,
    Finished,
    FinishReason,
    KvEvents,
    LoadSnapshot,
    QueuePosition,
    StepOutcome,
    StepPlan,
    StepUpdate,
)
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.request_table import RequestTable, deadline_passed
from services.scheduler.core.step_results import StepResults
from services.scheduler.core.stop import Stop, replay_stops

__all__ = ["EngineLimits", "Scheduler"]


class Scheduler:
    """One engine's requests, blocks and steps.

    Times are seconds on the caller's clock, passed in as ``now``. The caller sends each plan that
    ``schedule`` returns, in order, and gives each result to ``apply``, in order.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._counters = Counters()
        self._quarantine = Quarantine()
        self._kv = KVCacheManager(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self._table = RequestTable(
            kv=self._kv,
            quarantine=self._quarantine,
            counters=self._counters,
            prepare_timeout_s=limits.prepare_timeout_s,
        )
        self._results = StepResults(
            table=self._table, kv=self._kv, quarantine=self._quarantine, counters=self._counters
        )
        self._waiting = self._table.waiting
        self._running = self._table.running
        self._in_flight: deque[InFlightStep] = deque()
        self._last_planned = 0
        self._last_applied = 0

        self._intake = Intake(limits)
        self._drain_rate = DrainRate()
        self._cost_model = StepCostModel()
        self._token_budget = TokenBudget(
            limits.max_num_batched_tokens,
            target_s=limits.step_time_target_s,
            min_prefill_tokens=limits.block_size,
            cost_model=self._cost_model,
        )
        self._caps: list[Cap] = []
        if limits.long_prefill_token_threshold:
            self._caps.append(LongPrefillCap(limits.long_prefill_token_threshold))
        self._admission_rules: list[AdmissionRule] = [
            SeatRule(limits.max_num_seqs),
            AloneRule(),
            QuarantineRule(self._quarantine),
        ]

    # ---- requests come and go

    def add(self, choices: Sequence[Request], *, now: float) -> None:
        """Accept all choices of one request (several for n > 1), or none.

        The first choice is computed first; the others fork its prompt's full blocks. A choice whose
        ``resume_ids`` already hold its end finishes at once (see ``take_finished``).

        Raises:
            ContextLengthExceeded: It can never fit the context or the pool.
            InvalidRequest: A token id is not in the vocabulary, or the prompt is empty.
            Overloaded: The waiting queue is full; ``retry_after_s`` says when to come back.
        """
        self._require_queue_room(now)
        for request in choices:
            if request.handle in self._table.by_handle:
                raise InvariantError(f"handle {request.handle} is in use")
            self._intake.check(request)
        unfinished = []
        for request in choices:
            stop = replay_stops(request)
            if stop is None:
                unfinished.append(request)
            else:
                request.become(RequestStatus.FINISHED)
                self._table.note_end(request, stop, now=now)
        if unfinished:
            self._table.enter(unfinished, now=now)

    def _require_queue_room(self, now: float) -> None:
        num_waiting = self._table.num_waiting
        if num_waiting >= self._limits.max_waiting:
            retry_after_s = self._drain_rate.retry_after_s(num_waiting, now=now)
            raise Overloaded(
                f"{num_waiting} requests are waiting; at most {self._limits.max_waiting} may: "
                f"try again in {math.ceil(retry_after_s)} s; --max-waiting of the server sets "
                "how many may wait",
                retry_after_s=retry_after_s,
            )

    def prepared(self, handle: int, *, error: SluicewayError | None, now: float) -> None:
        """What a request waited for is ready, or has failed (then it ends ``error``).

        Call it for every choice added with ``needs_prepare``; unknown handles are ignored.
        """
        request = self._table.by_handle.get(handle)
        if request is None or request.status is not RequestStatus.WAITING_FOR_PREPARE:
            return
        if error is None:
            self._table.bring_back(request)
        else:
            self._table.fail(request, error, now=now)

    def abort(
        self, handle: int, *, reason: AbortReason, kept_tokens: int | None, now: float
    ) -> bool:
        """End a request at once; its finish is in ``take_finished``. Idempotent.

        Args:
            handle: The request.
            reason: STOP_STRING finishes as ``stop``, DEADLINE as ``error``, the rest as ``abort``.
            kept_tokens: Output tokens that the client keeps; None = all.
            now: The time.

        Returns:
            Whether the request was known (false: it has ended before).
        """
        request = self._table.by_handle.get(handle)
        if request is None:
            return False
        if reason is AbortReason.DEADLINE:
            self._table.fail(request, deadline_passed(), now=now)
            return True
        is_stop = reason is AbortReason.STOP_STRING
        stop = Stop(FinishReason.STOP if is_stop else FinishReason.ABORT)
        self._table.finish(request, stop, kept_tokens=kept_tokens, now=now)
        return True

    def expire(self, *, now: float) -> None:
        """End waiting requests whose deadline or prepare time has passed; ``schedule`` does too."""
        self._table.expire(now=now)

    def next_expiry(self) -> float | None:
        """When ``expire`` may next have something to do."""
        return self._table.next_expiry()

    # ---- planning a step

    def schedule(self, *, now: float) -> StepPlan | None:
        """Plan the next step; convert it before calling anything else.

        Returns:
            None while ``pipeline_depth`` steps are in flight or nothing can run. A plan without
            rows tells the worker which rows have ended when nothing is left to run.
        """
        self._table.expire(now=now)
        # A suspect's step is judged before the next is planned.
        depth = 1 if self._quarantine.is_active else self._limits.pipeline_depth
        if len(self._in_flight) >= depth:
            return None
        step = StepBuilder(
            self._last_planned + 1, budget=self._step_budget(), free_seq=self._last_applied
        )
        num_preemptions = self._counters.preemptions
        self._schedule_running(step)
        if self._counters.preemptions == num_preemptions:
            self._schedule_waiting(step, now=now)
        return self._close(step)

    def _step_budget(self) -> int:
        if not self._token_budget.has_target:
            return self._limits.max_num_batched_tokens
        running = self._running.requests
        num_decode_rows = _num_decode_rows(running)
        free_seats = self._limits.max_num_seqs - len(running)
        num_waiting = len(running) - num_decode_rows + min(len(self._waiting), free_seats)
        return self._token_budget.for_step(num_decode_rows, num_waiting=num_waiting)

    def _schedule_running(self, step: StepBuilder) -> None:
        """Let every running request go on, in order of rank.

        Preemption takes from the end of the list, so a request that has been scheduled in this step
        is never taken back out of it.
        """
        running = self._running.requests
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            if request.num_planned_tokens >= request.max_total_tokens:
                continue  # its last token is in flight
            num_tokens = request.num_planned_tokens - request.num_computed_tokens
            if num_tokens > 1:
                num_tokens = self._cap(request, num_tokens, step.budget, running[index:])
                if num_tokens == 0:
                    continue  # not break: those behind may still run
            new_block_ids: Sequence[int] = ()
            if request.num_computed_tokens + num_tokens > request.num_slots:
                taken = self._allocate_or_preempt(request, num_tokens)
                if taken is None:
                    return
                new_block_ids = taken
            self._advance(step, request, num_tokens, new_block_ids)

    def _cap(
        self, request: Request, num_tokens: int, budget: int, behind: Sequence[Request]
    ) -> int:
        """Limit a prompt's tokens; those behind it that decode keep their one token each."""
        for cap in self._caps:
            num_tokens = cap(request, num_tokens)
        if num_tokens + len(behind) > budget:
            num_tokens = min(num_tokens, budget - _num_decode_rows(behind))
        return max(0, num_tokens)

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Find slots, if need be by preempting from the last of the running.

        Returns:
            The new blocks; None if the request itself had to go.
        """
        while (new_block_ids := self._kv.allocate_slots(request, num_tokens)) is None:
            if self._table.give_up_a_fork():
                continue
            victim = self._running.requests[-1]
            self._table.preempt(victim)
            if victim is request:
                if not self._running:
                    raise InvariantError(f"request {request.handle} alone exceeds the pool")
                return None
        return new_block_ids

    def _schedule_waiting(self, step: StepBuilder, *, now: float) -> None:
        """Start waiting requests, in order of rank, until one does not fit."""
        skipped: list[Request] = []
        while step.budget > 0 and self._waiting:
            request = self._waiting.requests[0]
            verdict = self._judge(request)
            if verdict is Verdict.SKIP:
                self._waiting.remove(request)
                skipped.append(request)
            elif verdict is Verdict.STOP or not self._admit(step, request, now=now):
                break
        for request in skipped:
            self._waiting.add(request)

    def _judge(self, request: Request) -> Verdict:
        for rule in self._admission_rules:
            verdict = rule.judge(request, self._running.requests)
            if verdict is not Verdict.ADMIT:
                return verdict
        return Verdict.ADMIT

    def _admit(self, step: StepBuilder, request: Request, *, now: float) -> bool:
        """Start one waiting request; false (and nothing changed) if the pool is short."""
        while True:
            hits = [] if request.block_ids else self._kv.get_computed_blocks(request)
            num_found = request.num_slots + len(hits) * self._limits.block_size
            num_tokens = self._cap(request, request.num_tokens - num_found, step.budget, ())
            if self._kv.admit(request, hits, num_tokens=num_tokens):
                break
            # With nobody running nobody will free a block, but forks that wait may hold some.
            if self._running or not self._table.give_up_a_fork():
                return False
        is_fork = self._table.start(request)
        self._note_admission(request, num_found=num_found, is_fork=is_fork, now=now)
        step.add_new_row(request, num_computed_tokens=num_found)
        self._advance(step, request, num_tokens, ())
        return True

    def _note_admission(
        self, request: Request, *, num_found: int, is_fork: bool, now: float
    ) -> None:
        """Count a success; what was looked up in vain is looked up again, and counts then."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_found
            request.first_scheduled_s = now
            self._counters.prompt_tokens += request.num_prompt_tokens
            self._drain_rate.note_admission(now=now)
        if request.reads_prefix_cache and not is_fork:
            self._counters.prefix_queries += request.num_tokens
            self._counters.prefix_hits += num_found

    def _advance(
        self, step: StepBuilder, request: Request, num_tokens: int, new_block_ids: Sequence[int]
    ) -> None:
        """Give a request its tokens in this step, and draw the consequences."""
        num_computed = request.num_computed_tokens + num_tokens
        request.num_computed_tokens = num_computed
        request.num_scheduled_tokens += num_tokens
        samples = num_computed == request.num_planned_tokens
        if samples:
            request.num_planned_tokens = num_computed + 1
        if num_computed >= request.next_key_at and request.num_tokens >= request.next_key_at:
            num_known = min(num_computed, request.num_tokens)
            self._kv.cache_full_blocks(request, num_known, step=step.plan.step)
        step.add_row(request, num_tokens, new_block_ids=new_block_ids, samples=samples)
        if request.fork_group is not None and num_computed >= request.num_prompt_tokens:
            self._table.fork(request)

    def _close(self, step: StepBuilder) -> StepPlan | None:
        """Make a plan of the rows, if there is anything to say."""
        plan, in_flight, table = step.plan, step.in_flight, self._table
        has_news = bool(table.ended_rows or table.preempted_rows)
        if not plan.handles and (self._running or not has_news):
            return None
        plan.finished, table.ended_rows = table.ended_rows, []
        plan.preempted, table.preempted_rows = table.preempted_rows, []
        plan.num_prefill_tokens = in_flight.num_prefill_tokens
        plan.total_num_tokens = in_flight.num_prefill_tokens + in_flight.num_decode_rows
        plan.predicted_s = self._cost_model.predict(
            num_decode_rows=in_flight.num_decode_rows,
            num_prefill_tokens=in_flight.num_prefill_tokens,
        )
        self._last_planned = plan.step
        self._in_flight.append(in_flight)
        return plan

    # ---- applying a result

    def apply(self, outcome: StepOutcome, *, now: float) -> StepUpdate:
        """Take the result of the oldest step in flight.

        Raises:
            InvariantError: It is not the result of the oldest step in flight: the engine is out of
                order and must be given up.
        """
        if not self._in_flight or self._in_flight[0].step != outcome.step:
            expected = self._in_flight[0].step if self._in_flight else "none"
            raise InvariantError(f"result of step {outcome.step}, expected of step {expected}")
        in_flight = self._in_flight.popleft()
        self._last_applied = outcome.step
        update = StepUpdate(step=outcome.step)
        if outcome.failed is not None:
            self._apply_failure(in_flight, outcome.failed, now=now)
        else:
            self._results.apply(in_flight, outcome, update, now=now)
            self._cost_model.observe(
                num_decode_rows=in_flight.num_decode_rows,
                num_prefill_tokens=in_flight.num_prefill_tokens,
                device_s=outcome.device_s,
            )
        update.finished = self.take_finished()
        return update

    def _apply_failure(self, in_flight: InFlightStep, message: str, *, now: float) -> None:
        if in_flight.is_void:
            return  # or the rows that start over would be given up again, perhaps for ever
        self._results.apply_failure(in_flight, message, now=now)
        for step in self._in_flight:
            step.is_void = True

    def take_finished(self) -> list[Finished]:
        """Finishes since the last ``apply`` or call of this; each request appears exactly once."""
        finished, self._table.finished = self._table.finished, []
        return finished

    # ---- moving requests to another engine

    def lose_engine(self) -> list[Request]:
        """The worker is gone: give back all unfinished requests, in order, to be added elsewhere.

        Those of the steps in flight have ``crashes`` raised. Choices of one request keep their
        order; add them together. This scheduler must not be used again.
        """
        for request in {request for step in self._in_flight for request in step.live_requests()}:
            request.crashes += 1
        requests = sorted(self._table.by_handle.values(), key=lambda request: request.rank)
        for request in requests:
            request.leave_engine()
        self._table.by_handle.clear()
        return requests

    def withdraw(self, handle: int) -> Request | None:
        """Give back a waiting request that holds nothing here, to be added elsewhere."""
        request = self._table.by_handle.get(handle)
        if (
            request is None
            or request.status is not RequestStatus.WAITING
            or request.fork_group is not None
            or request.block_ids
        ):
            return None
        self._table.withdraw(request)
        request.leave_engine()
        return request

    # ---- asking

    def get(self, handle: int) -> Request | None:
        """A request that has not ended; not to be written to."""
        return self._table.by_handle.get(handle)

    def take_kv_events(self) -> KvEvents:
        """Keys that other engines may now count on, or no longer."""
        return self._kv.pool.take_events()

    def published_keys(self) -> bytes:
        """All keys that the KV events so far amount to, 16 bytes each, for a snapshot."""
        return self._kv.pool.published_keys()

    def reset_prefix_cache(self) -> bool:
        """Forget all keys; false (and nothing done) while a request holds blocks."""
        return self._kv.pool.reset()

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a request that this engine's cache holds; changes nothing here."""
        return self._kv.num_cached_tokens(request)

    def queue_position(self, handle: int, *, now: float) -> QueuePosition | None:
        """Where a waiting request stands; None if it is not waiting."""
        request = self._table.by_handle.get(handle)
        if request is None or request.status is RequestStatus.RUNNING:
            return None
        position = self._waiting.position(request)
        free_seats = self._limits.max_num_seqs - len(self._running)
        if position < free_seats:
            return QueuePosition(position, 0.0)
        eta_s = self._drain_rate.eta_s(position - free_seats + 1, now=now)
        return QueuePosition(position, eta_s)

    def load(self) -> LoadSnapshot:
        """State and counters."""
        counters = self._counters
        return LoadSnapshot(
            running=len(self._running),
            waiting=self._table.num_waiting,
            preemptions=counters.preemptions,
            generated_tokens=counters.generated_tokens,
            prompt_tokens=counters.prompt_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            finished_stop=counters.finished[FinishReason.STOP],
            finished_length=counters.finished[FinishReason.LENGTH],
            finished_abort=counters.finished[FinishReason.ABORT],
            finished_error=counters.finished[FinishReason.ERROR],
            waiting_uncached_tokens=self._waiting.num_uncached_tokens,
            kv_blocks_used=self._kv.pool.num_used,
            kv_blocks_total=self._kv.pool.num_usable,
            prefill_tok_s=self._cost_model.prefill_tok_s,
            decode_tok_s=self._cost_model.decode_tok_s,
            steps=self._last_applied,
        )

    @property
    def has_work(self) -> bool:
        """Whether steps are wanted: a request can run, or the worker must be told of an end."""
        return bool(self._running or self._waiting or self._table.ended_rows)

    @property
    def num_in_flight(self) -> int:
        """Steps sent whose results have not been applied."""
        return len(self._in_flight)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._table.by_handle)


def _num_decode_rows(requests: Sequence[Request]) -> int:
    return sum(
        1 for request in requests if request.num_planned_tokens - request.num_computed_tokens == 1
    )
