"""Values of the scheduler as protobuf messages and back. Times on the wire are unix nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.convert import (
    constraint_from_message,
    error_from_message,
    error_to_message,
    pooling_to_message,
    pools_from_message,
    sampling_from_message,
    sampling_to_message,
)
from services.common.errors import InvalidRequest
from services.common.pb import common_pb2, kvstore_pb2, scheduler_pb2, worker_pb2
from services.common.sampling import Constraint, SamplingParams
from services.scheduler.core.output import (
    AbortReason,
    Finished,
    FinishReason,
    Life,
    LoadSnapshot,
    NewRow,
    StepOutcome,
    StepPlan,
    Usage,
)
from services.scheduler.kv_feed import EngineCard, KvChange
from services.scheduler.submission import ChoiceSpec, Submission
from services.scheduler.ticket import Decision
from services.scheduler.worker_profile import LoadingProgress, WorkerFacts, WorkerIdentity

_LOAD_FIELDS = tuple(LoadSnapshot.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class WallClock:
    """Turns monotonic seconds into unix nanoseconds; the distance is measured once per process."""

    offset_s: float

    @classmethod
    def now(cls) -> WallClock:
        """The distance as it is now."""
        return cls(time.time() - time.monotonic())

    def unix_ns(self, monotonic_s: float | None) -> int:
        """``None`` (did not happen) is 0."""
        return 0 if monotonic_s is None else int((monotonic_s + self.offset_s) * 1e9)

    def monotonic_s(self, unix_ns: int) -> float | None:
        """The inverse of ``unix_ns``, to a microsecond."""
        return unix_ns / 1e9 - self.offset_s if unix_ns else None


# Attach: what a worker says


def identity_from_message(hello: worker_pb2.WorkerHello) -> WorkerIdentity:
    """Who attaches."""
    return WorkerIdentity(
        engine_id=hello.engine_id,
        worker_id=hello.worker_id,
        model=hello.model,
        text_fp=hello.text_fp,
        kv_fp=hello.kv_fp,
        address=hello.address,
    )


def loading_from_message(loading: common_pb2.Loading) -> LoadingProgress:
    """The inverse of ``loading_to_message``."""
    return LoadingProgress(
        phase=loading.phase,
        fraction=loading.fraction,
        done_bytes=loading.done_bytes,
        total_bytes=loading.total_bytes,
    )


def loading_to_message(progress: LoadingProgress) -> common_pb2.Loading:
    """The inverse of ``loading_from_message``."""
    return common_pb2.Loading(
        phase=progress.phase,
        fraction=progress.fraction,
        done_bytes=progress.done_bytes,
        total_bytes=progress.total_bytes,
    )


def facts_from_message(info: common_pb2.WorkerInfo) -> WorkerFacts:
    """The inverse of ``facts_to_message``.

    Raises:
        InvalidRequest: The worker has not exactly one KV group.
    """
    if len(info.kv_groups) != 1:
        raise InvalidRequest(
            f"a worker must have exactly one KV group, this one has {len(info.kv_groups)}",
            param="kv_groups",
        )
    return WorkerFacts(
        num_blocks=info.num_blocks,
        block_size=info.kv_groups[0].block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        pipeline_depth=info.pipeline_depth,
        features=tuple(info.features),
        revision=info.revision,
        device=info.device,
        dtype=info.dtype,
    )


def facts_to_message(facts: WorkerFacts) -> common_pb2.WorkerInfo:
    """The inverse of ``facts_from_message``."""
    return common_pb2.WorkerInfo(
        num_blocks=facts.num_blocks,
        kv_groups=[common_pb2.KvGroup(block_size=facts.block_size, kind="full")],
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        pipeline_depth=facts.pipeline_depth,
        features=facts.features,
        revision=facts.revision,
        device=facts.device,
        dtype=facts.dtype,
    )


class LogprobColumns:
    """The log-probabilities of one result, found by the positions of the tokens they describe."""

    def __init__(self, message: common_pb2.Logprobs) -> None:
        self._message = message
        self._row_of = {position: row for row, position in enumerate(message.position)}
        self._top_start = [0]
        for count in message.num_top:
            self._top_start.append(self._top_start[-1] + count)

    def of(self, start: int, count: int) -> common_pb2.Logprobs | None:
        """Columns of ``count`` tokens from ``start``, positions counted from ``start``."""
        if not self._row_of:
            return None
        found = common_pb2.Logprobs()
        for position in range(start, start + count):
            row = self._row_of.get(position)
            if row is not None:
                self._append(found, row, position=position - start)
        return found if found.position else None

    def _append(self, found: common_pb2.Logprobs, row: int, *, position: int) -> None:
        source = self._message
        first, last = self._top_start[row], self._top_start[row + 1]
        found.position.append(position)
        found.logprob.append(source.logprob[row])
        found.rank.append(source.rank[row])
        found.num_top.append(source.num_top[row])
        found.top_ids.extend(source.top_ids[first:last])
        found.top_logprobs.extend(source.top_logprobs[first:last])


def outcome_from_bytes(data: bytes) -> tuple[StepOutcome, LogprobColumns]:
    """Parse what the worker's executor wrote."""
    message = worker_pb2.StepResult.FromString(data)
    outcome = StepOutcome(
        step=message.step,
        handles=list(message.handle),
        num_sampled=list(message.num_sampled),
        token_ids=list(message.token_ids),
        prompt_logprobs={chunk.handle: chunk for chunk in message.prompt_logprobs},
        row_errors={
            handle: error_from_message(error)
            for handle, error in zip(message.row_error_handle, message.row_error, strict=True)
        },
        pooled={vector.handle: vector.values for vector in message.pooled},
        failed=_failure_of(message),
        device_s=message.device_us / 1e6,
        gap_s=message.gap_us / 1e6,
    )
    return outcome, LogprobColumns(message.logprobs)


def _failure_of(message: worker_pb2.StepResult) -> str | None:
    if not message.HasField("failed"):
        return None
    return f"{message.failed.error_class}: {message.failed.message}"


# Attach: what a worker is told


def plan_to_bytes(plan: StepPlan) -> bytes:
    """Serialise a step; the worker's executor parses it."""
    message = worker_pb2.ScheduledStep(
        step=plan.step,
        finished=plan.finished,
        preempted=plan.preempted,
        new_requests=[_new_row_to_message(row) for row in plan.new_rows],
        handle=plan.handles,
        num_tokens=plan.num_tokens,
        num_new_blocks=plan.num_new_blocks,
        new_block_ids=plan.new_block_ids,
        free_seq=plan.free_seq,
    )
    return message.SerializeToString()


def plan_from_bytes(data: bytes) -> StepPlan:
    """The inverse of ``plan_to_bytes``, but for what the worker need not know."""
    message = worker_pb2.ScheduledStep.FromString(data)
    return StepPlan(
        step=message.step,
        finished=list(message.finished),
        preempted=list(message.preempted),
        new_rows=[_new_row_from_message(row) for row in message.new_requests],
        handles=list(message.handle),
        num_tokens=list(message.num_tokens),
        num_new_blocks=list(message.num_new_blocks),
        new_block_ids=list(message.new_block_ids),
        free_seq=message.free_seq,
        total_num_tokens=sum(message.num_tokens),
    )


def _new_row_to_message(row: NewRow) -> worker_pb2.NewRequest:
    return worker_pb2.NewRequest(
        handle=row.handle,
        choice=row.choice,
        token_ids=row.token_ids,
        num_prompt_tokens=row.num_prompt_tokens,
        num_computed_tokens=row.num_computed_tokens,
        sampling=sampling_to_message(row.sampling),
        grammar_ref=row.grammar_ref,
        block_ids=row.block_ids,
        prompt_logprobs_done=row.prompt_logprobs_done,
        pooling=pooling_to_message(row.pools),
    )


def _new_row_from_message(message: worker_pb2.NewRequest) -> NewRow:
    return NewRow(
        handle=message.handle,
        choice=message.choice,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        sampling=sampling_from_message(message.sampling),
        grammar_ref=message.grammar_ref,
        block_ids=tuple(message.block_ids),
        prompt_logprobs_done=message.prompt_logprobs_done,
        pools=pools_from_message(message.pooling),
    )


# Session: what a client says


def submission_from_message(message: scheduler_pb2.Add, *, text_fp: str) -> Submission:
    """Check and convert an Add.

    Args:
        message: As it came.
        text_fp: Of the Session's client.

    Raises:
        InvalidRequest: A value is missing or means nothing; names the field.
    """
    if not message.key.request_id:
        raise InvalidRequest("an Add needs a request_id", param="request_id")
    sampling = _sampling_of(message)
    sampling.validate()
    pools = pools_from_message(message.pooling)
    if pools:
        _require_poolable(message, sampling)
    return Submission(
        request_id=message.key.request_id,
        attempt=message.key.attempt,
        model=message.model,
        text_fp=text_fp,
        prompt_ids=tuple(message.prompt_ids),
        sampling=sampling,
        choices=tuple(
            ChoiceSpec(choice.handle, choice.index, tuple(choice.resume_ids))
            for choice in message.choices
        ),
        prompt_logprobs_done=message.prompt_logprobs_done,
        crashes=message.crashes,
        priority=message.priority,
        cache_namespace=message.cache_namespace,
        deadline_s=message.deadline_ms / 1000 if message.HasField("deadline_ms") else None,
        constraint=_constraint_of(message),
        pools=pools,
    )


def _require_poolable(message: scheduler_pb2.Add, sampling: SamplingParams) -> None:
    """A vector is made of a prompt alone."""
    if (
        len(message.choices) != 1
        or message.choices[0].resume_ids
        or message.HasField("constraint")
        or sampling.prompt_logprobs is not None
    ):
        raise InvalidRequest(
            "pooling takes one choice, and no resumed output, constraint or prompt_logprobs",
            param="pooling",
        )


def _sampling_of(message: scheduler_pb2.Add) -> SamplingParams:
    try:
        return sampling_from_message(message.sampling)
    except ValueError as error:
        raise InvalidRequest(f"sampling cannot be read: {error}", param="sampling") from None


def _constraint_of(message: scheduler_pb2.Add) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    try:
        return constraint_from_message(message.constraint)
    except ValueError as error:
        raise InvalidRequest(f"the constraint is unknown: {error}", param="constraint") from None


_ABORT_REASONS: Mapping[int, AbortReason] = {reason.value: reason for reason in AbortReason}


def abort_reason_from_message(value: int) -> AbortReason:
    """A reason that this version does not know ends the request as if the client had gone."""
    return _ABORT_REASONS.get(value, AbortReason.CLIENT_GONE)


# Session: what a client is told


def load_to_message(load: LoadSnapshot, message: common_pb2.Load) -> None:
    """Write a load into a message."""
    for name in _LOAD_FIELDS:
        setattr(message, name, getattr(load, name))


def load_from_message(message: common_pb2.Load) -> LoadSnapshot:
    """The inverse of ``load_to_message``."""
    return LoadSnapshot(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def finished_to_message(
    finished: Finished, message: scheduler_pb2.FinishedHandle, *, clock: WallClock
) -> None:
    """Write a finish into a message; the handle is the caller's to set."""
    message.reason = common_pb2.FinishReason.ValueType(finished.reason.value)
    if finished.stop_token_id is not None:
        message.stop_token_id = finished.stop_token_id
    message.stop_detail = finished.stop_detail
    message.pooled = finished.pooled
    if finished.error is not None:
        message.error.CopyFrom(error_to_message(finished.error))
    message.usage.CopyFrom(usage_to_message(finished.usage))
    message.life.CopyFrom(life_to_message(finished.life, clock=clock))


def finished_from_message(
    message: scheduler_pb2.FinishedHandle, *, clock: WallClock, finished_s: float
) -> Finished:
    """The inverse of ``finished_to_message``; the wire does not carry the time of the finish."""
    return Finished(
        handle=message.handle,
        reason=FinishReason(message.reason),
        usage=usage_from_message(message.usage),
        life=life_from_message(message.life, clock=clock, finished_s=finished_s),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_detail=message.stop_detail,
        error=error_from_message(message.error) if message.HasField("error") else None,
        pooled=message.pooled,
    )


def usage_to_message(usage: Usage) -> common_pb2.Usage:
    """The inverse of ``usage_from_message``."""
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        output_tokens=usage.output_tokens,
        wasted_tokens=usage.wasted_tokens,
    )


def usage_from_message(message: common_pb2.Usage) -> Usage:
    """The inverse of ``usage_to_message``."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        computed_tokens=message.computed_tokens,
        output_tokens=message.output_tokens,
        wasted_tokens=message.wasted_tokens,
    )


def life_to_message(life: Life, *, clock: WallClock) -> common_pb2.Life:
    """The timestamps of a choice."""
    return common_pb2.Life(
        arrival_unix_ns=clock.unix_ns(life.arrival_s),
        scheduled_unix_ns=clock.unix_ns(life.first_scheduled_s),
        first_token_unix_ns=clock.unix_ns(life.first_token_s),
        last_token_unix_ns=clock.unix_ns(life.last_token_s),
        num_preemptions=life.num_preemptions,
        attempt=life.attempt,
    )


def life_from_message(message: common_pb2.Life, *, clock: WallClock, finished_s: float) -> Life:
    """The inverse of ``life_to_message``; the wire does not carry the time of the finish."""
    return Life(
        arrival_s=clock.monotonic_s(message.arrival_unix_ns) or 0.0,
        first_scheduled_s=clock.monotonic_s(message.scheduled_unix_ns),
        first_token_s=clock.monotonic_s(message.first_token_unix_ns),
        last_token_s=clock.monotonic_s(message.last_token_unix_ns),
        finished_s=finished_s,
        num_preemptions=message.num_preemptions,
        attempt=message.attempt,
    )


def decision_to_message(decision: Decision, *, finished: Finished) -> common_pb2.DecisionRecord:
    """What was predicted when the request was placed, beside what came of it."""
    life = finished.life
    waited = life.first_scheduled_s if life.first_scheduled_s is not None else life.finished_s
    return common_pb2.DecisionRecord(
        engine_id=decision.engine_ids,
        predicted_cached_tokens=decision.cached_tokens,
        predicted_cost_s=decision.costs_s,
        chosen_engine_id=decision.chosen_engine_id,
        actual_cached_tokens=finished.usage.cached_tokens,
        predicted_wait_s=decision.wait_s,
        actual_wait_s=max(waited - life.arrival_s, 0.0),
    )


# KV events


def kv_change_to_message(
    change: KvChange, card: EngineCard, *, introduces: bool
) -> kvstore_pb2.KvEvents:
    """A numbered change, or a chunk of a snapshot."""
    message = kvstore_pb2.KvEvents(
        engine_id=card.engine_id,
        seq=change.seq,
        stored=change.stored,
        removed=change.removed,
        cleared=change.is_cleared,
        gone=change.is_gone,
    )
    if change.is_snapshot:
        message.snapshot.CopyFrom(
            kvstore_pb2.Snapshot(base_seq=change.seq, chunk=change.chunk, last=change.is_last)
        )
    if introduces:
        message.record.CopyFrom(_card_to_message(card))
    return message


def _card_to_message(card: EngineCard) -> kvstore_pb2.EngineRecord:
    return kvstore_pb2.EngineRecord(
        engine_id=card.engine_id,
        worker_id=card.worker_id,
        scheduler_address=card.scheduler_address,
        model=card.model,
        text_fp=card.text_fp,
        kv_fp=card.kv_fp,
        block_size=card.block_size,
        num_blocks=card.num_blocks,
    )
