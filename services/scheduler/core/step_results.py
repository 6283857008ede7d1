"""What the result of a step means for the requests that were in it.

A row counts only while its request is still in the life that the step was planned for; everything
else about a request has moved on, and its row is dropped (see ``InFlightStep``).
"""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import RequestFailed, SluicewayError
from services.scheduler.core.counters import Counters
from services.scheduler.core.in_flight import InFlightStep
from services.scheduler.core.kv_cache_manager import KVCacheManager
from services.scheduler.core.output import FinishReason, StepOutcome, StepUpdate
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.request import Request, life_id
from services.scheduler.core.request_table import RequestTable
from services.scheduler.core.stop import Stop, find_stop


class StepResults:
    """Applies results, in the order of their steps, to the requests of one engine."""

    def __init__(
        self,
        *,
        table: RequestTable,
        kv: KVCacheManager,
        quarantine: Quarantine,
        counters: Counters,
    ) -> None:
        self._table = table
        self._kv = kv
        self._quarantine = quarantine
        self._counters = counters

    def apply(
        self, in_flight: InFlightStep, outcome: StepOutcome, update: StepUpdate, *, now: float
    ) -> None:
        """Apply a step that ran; rows that failed alone end alone."""
        # Before the keys are published and the tokens believed: both may build on a bad row's KV.
        for handle, error in outcome.row_errors.items():
            self._apply_row_error(in_flight, handle, error, now=now)
        self._kv.pool.confirm(outcome.step)
        if outcome.prompt_logprobs:
            _keep_prompt_logprobs(in_flight, outcome)
        self._apply_tokens(in_flight, outcome, update, now=now)

    def apply_failure(self, in_flight: InFlightStep, message: str, *, now: float) -> None:
        """Apply a step that failed: nothing that steps in flight write can be trusted.

        All rows start over. Those of the failed step run again in halves, until the guilty one is
        alone; that one ends with an error.
        """
        guilty = self._quarantine.note_failed(list(in_flight.live_requests()))
        self._kv.pool.drop_tentative()
        for request in reversed(self._table.running.requests.copy()):
            self._table.preempt(request)
        self._table.give_up_forks()
        if guilty is not None:
            error = RequestFailed(f"the step failed with this request alone in it: {message}")
            self._table.fail(guilty, error, now=now)

    def _apply_row_error(
        self, in_flight: InFlightStep, handle: int, error: SluicewayError, *, now: float
    ) -> None:
        """One row went wrong: it ends, and whoever built on its KV computes again."""
        if handle not in in_flight.handles:
            return
        row = in_flight.handles.index(handle)
        request, generation = in_flight.requests[row], in_flight.generations[row]
        # Not what a later life of the row has written: were that thrown out here, and the life with
        # it, the errors of two lives would chase each other for ever.
        lives = range(life_id(handle, 0), life_id(handle, generation) + 1)
        bad_block_ids = self._kv.pool.forget_written_by(lives)
        if request.generation == generation:
            self._table.fail(request, error, now=now)
        for holder in reversed(self._table.running.requests.copy()):
            if self._builds_on(holder, bad_block_ids):
                self._table.preempt(holder)
        self._table.give_up_forks(bad_block_ids)

    def _builds_on(self, holder: Request, bad_block_ids: set[int]) -> bool:
        """Whether a running request holds bad blocks that it has not written itself.

        What it has written in this life builds on the rest of its table, wherever else a block of
        the same key may have come from.
        """
        life = life_id(holder.handle, holder.generation)
        return any(
            block_id in bad_block_ids and self._kv.pool.writer_of(block_id) != life
            for block_id in holder.block_ids
        )

    def _apply_tokens(
        self, in_flight: InFlightStep, outcome: StepOutcome, update: StepUpdate, *, now: float
    ) -> None:
        """Append each live row's token, or take its vector, and see whether that is its end."""
        token_ids = outcome.token_ids
        starts, counts = _aligned(in_flight, outcome)
        for request, generation, samples, start, count in zip(
            in_flight.requests,
            in_flight.generations,
            in_flight.samples,
            starts,
            counts,
            strict=True,
        ):
            if request.generation != generation or not samples:
                continue
            if request.pools:
                self._take_vector(request, outcome.pooled.get(request.handle), now=now)
                continue
            if count != 1:
                error = RequestFailed(f"the worker returned {count} tokens where 1 was due")
                self._table.fail(request, error, now=now)
                continue
            update.handles.append(request.handle)
            update.offsets.append(request.num_tokens - request.num_prompt_tokens)
            update.counts.append(1)
            update.source_starts.append(start)
            update.token_ids.append(token_ids[start])
            if request.prompt_logprob_chunks:
                update.prompt_logprobs += [(request.handle, c) for c in request.take_chunks()]
            self._append(request, token_ids[start], now=now)

    def _take_vector(self, request: Request, vector: bytes | None, *, now: float) -> None:
        """The whole prompt of a request that pools is computed: that is its end."""
        if vector is None:
            self._table.fail(request, RequestFailed("the worker returned no vector"), now=now)
            return
        request.pooled = vector
        self._table.finish(request, Stop(FinishReason.STOP), now=now)

    def _append(self, request: Request, token_id: int, *, now: float) -> None:
        request.append_token(token_id, now=now)
        self._counters.generated_tokens += 1
        # The steps up to this one have computed every token but the new one.
        if request.num_tokens > request.next_key_at:
            self._kv.cache_full_blocks(request, request.num_tokens - 1, step=None)
        if request.may_have_ended:
            stop = find_stop(request)
            if stop is not None:
                self._table.finish(request, stop, now=now)
                return
        if self._quarantine.is_active:
            self._pass_quarantine(request)

    def _pass_quarantine(self, request: Request) -> None:
        """A suspect got a token: it makes room for the next and waits until all are judged."""
        self._quarantine.discard(request)
        if self._quarantine.is_active:
            self._table.preempt(request)


def _aligned(in_flight: InFlightStep, outcome: StepOutcome) -> tuple[Sequence[int], Sequence[int]]:
    """Where each planned row's tokens start in the result, and how many there are (0: missing)."""
    starts, start = [], 0
    for count in outcome.num_sampled:
        starts.append(start)
        start += count
    if in_flight.handles == outcome.handles:
        return starts, outcome.num_sampled
    index_by_handle = {handle: index for index, handle in enumerate(outcome.handles)}
    rows = [index_by_handle.get(handle) for handle in in_flight.handles]
    return (
        [0 if row is None else starts[row] for row in rows],
        [0 if row is None else outcome.num_sampled[row] for row in rows],
    )


def _keep_prompt_logprobs(in_flight: InFlightStep, outcome: StepOutcome) -> None:
    """Hold chunks back until the prompt is complete: a preempted prompt starts over."""
    for request in in_flight.live_requests():
        chunk = outcome.prompt_logprobs.get(request.handle)
        if chunk is not None:
            request.prompt_logprob_chunks.append(chunk)
