"""Every value of the scheduler survives the wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.convert import error_from_message, error_to_message
from services.common.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    SluicewayError,
    WorkerLost,
)
from services.common.pb import common_pb2, worker_pb2
from services.common.pb import scheduler_pb2 as pb
from services.common.sampling import Constraint, ConstraintKind, SamplingParams
from services.scheduler import convert
from services.scheduler.core.output import (
    AbortReason,
    Finished,
    FinishReason,
    Life,
    LoadSnapshot,
    NewRow,
    StepPlan,
    Usage,
)
from services.scheduler.kv_feed import EngineCard, KvChange
from services.scheduler.submission import ChoiceSpec
from services.scheduler.ticket import Decision
from services.scheduler.worker_profile import LoadingProgress, WorkerFacts

TEXT = st.text("ab é\n", max_size=20)
U32 = st.integers(0, 2**32 - 1)
IDS = st.lists(U32, max_size=8)
TIMES = st.one_of(st.none(), st.integers(1, 10_000_000).map(lambda us: us / 1e6))
CLOCK = convert.WallClock(offset_s=1_000_000.0)
ERRORS = st.builds(
    lambda kind, text, param, retry_s: kind(text, param=param, retry_after_s=retry_s),
    st.sampled_from([InvalidRequest, ContextLengthExceeded, Overloaded, RequestFailed, WorkerLost]),
    TEXT,
    st.one_of(st.none(), st.just("max_tokens")),
    st.one_of(st.none(), st.just(1.5)),
)
NEW_ROWS = st.builds(
    NewRow,
    handle=U32,
    choice=U32,
    token_ids=IDS.map(tuple),
    num_prompt_tokens=U32,
    num_computed_tokens=U32,
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        seed=st.integers(-(2**63), 2**63 - 1),
        max_tokens=st.one_of(st.none(), st.integers(1, 1000)),
    ),
    grammar_ref=U32,
    block_ids=IDS.map(tuple),
    prompt_logprobs_done=st.booleans(),
    pools=st.booleans(),
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    handles = draw(IDS)
    tokens = draw(st.lists(st.integers(1, 1000), min_size=len(handles), max_size=len(handles)))
    blocks = draw(st.lists(st.integers(0, 3), min_size=len(handles), max_size=len(handles)))
    return StepPlan(
        step=draw(st.integers(0, 2**63)),
        finished=draw(IDS),
        preempted=draw(IDS),
        new_rows=draw(st.lists(NEW_ROWS, max_size=3)),
        handles=handles,
        num_tokens=tokens,
        num_new_blocks=blocks,
        new_block_ids=draw(st.lists(U32, min_size=sum(blocks), max_size=sum(blocks))),
        free_seq=draw(st.integers(0, 2**63)),
        total_num_tokens=sum(tokens),
    )


@given(plans())
def test_a_step_survives_the_wire(plan: StepPlan) -> None:
    assert convert.plan_from_bytes(convert.plan_to_bytes(plan)) == plan


def same_error(one: SluicewayError | None, other: SluicewayError | None) -> bool:
    if one is None or other is None:
        return one is other
    return (type(one), one.message, one.param, one.retry_after_s) == (
        type(other),
        other.message,
        other.param,
        other.retry_after_s,
    )


@given(ERRORS)
def test_an_error_survives_the_wire(error: SluicewayError) -> None:
    assert same_error(error_from_message(error_to_message(error)), error)


@given(
    st.builds(
        Finished,
        handle=st.just(0),
        reason=st.sampled_from(FinishReason),
        usage=st.builds(Usage, U32, U32, U32, U32, U32),
        life=st.builds(
            Life,
            arrival_s=st.integers(1, 10_000_000).map(lambda us: us / 1e6),
            first_scheduled_s=TIMES,
            first_token_s=TIMES,
            last_token_s=TIMES,
            finished_s=st.just(99.0),
            num_preemptions=U32,
            attempt=U32,
        ),
        stop_token_id=st.one_of(st.none(), U32),
        stop_detail=TEXT,
        error=st.one_of(st.none(), ERRORS),
        pooled=st.binary(max_size=8),
    )
)
def test_a_finish_survives_the_wire(finished: Finished) -> None:
    message = pb.FinishedHandle()
    convert.finished_to_message(finished, message, clock=CLOCK)
    back = convert.finished_from_message(message, clock=CLOCK, finished_s=99.0)
    assert same_error(back.error, finished.error)
    assert back.pooled == finished.pooled
    assert (back.reason, back.usage, back.stop_token_id, back.stop_detail) == (
        finished.reason,
        finished.usage,
        finished.stop_token_id,
        finished.stop_detail,
    )
    for name in ("arrival_s", "first_scheduled_s", "first_token_s", "last_token_s"):
        sent, got = getattr(finished.life, name), getattr(back.life, name)
        assert (sent is None and got is None) or abs(sent - got) < 1e-3
    assert back.life.num_preemptions == finished.life.num_preemptions
    assert back.life.attempt == finished.life.attempt


@given(st.integers(0, 2**32 - 1))
def test_a_load_survives_the_wire(value: int) -> None:
    fields = LoadSnapshot.__dataclass_fields__
    load = LoadSnapshot(**dict.fromkeys(fields, value))
    message = common_pb2.Load()
    convert.load_to_message(load, message)
    assert convert.load_from_message(message) == load


def test_every_field_of_the_load_message_is_filled() -> None:
    names = {field.name for field in common_pb2.Load.DESCRIPTOR.fields}
    assert names == set(LoadSnapshot.__dataclass_fields__)


def test_what_a_worker_discovered_survives_the_wire() -> None:
    facts = WorkerFacts(
        num_blocks=100,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        vocab_size=49152,
        eos_token_ids=(2, 7),
        pipeline_depth=2,
        features=("a", "b"),
        revision="r",
        device="cpu",
        dtype="float32",
    )
    assert convert.facts_from_message(convert.facts_to_message(facts)) == facts


def test_loading_progress_survives_the_wire() -> None:
    progress = LoadingProgress("weights", 0.5, done_bytes=10, total_bytes=20)
    assert convert.loading_from_message(convert.loading_to_message(progress)) == progress


def test_an_add_becomes_a_submission() -> None:
    add = pb.Add(
        key=common_pb2.RequestKey(request_id="r", attempt=3),
        model="m",
        prompt_ids=[1, 2, 3],
        sampling=common_pb2.SamplingParams(temperature=0.5, max_tokens=7),
        choices=[pb.AddChoice(handle=4, index=1, resume_ids=[9])],
        crashes=1,
        priority=-2,
        cache_namespace="ns",
        deadline_ms=1500,
        constraint=common_pb2.Constraint(kind=common_pb2.CONSTRAINT_KIND_REGEX, spec="a+"),
    )
    got = convert.submission_from_message(add, text_fp="t")
    assert (got.request_id, got.attempt, got.model, got.text_fp) == ("r", 3, "m", "t")
    assert got.prompt_ids == (1, 2, 3)
    assert (got.sampling.temperature, got.sampling.max_tokens) == (0.5, 7)
    assert got.choices == (ChoiceSpec(4, 1, (9,)),)
    assert (got.crashes, got.priority, got.cache_namespace) == (1, -2, "ns")
    assert got.deadline_s == 1.5
    assert got.constraint == Constraint(ConstraintKind.REGEX, "a+")
    assert not got.pools


def pooling_add(**fields: Any) -> pb.Add:
    """An Add that wants a vector, with one choice unless told otherwise."""
    fields.setdefault("choices", [pb.AddChoice(handle=1)])
    return pb.Add(pooling=common_pb2.POOLING_KIND_MEAN, **fields)


def test_an_add_that_pools_becomes_a_submission_that_does() -> None:
    add = pooling_add(key=common_pb2.RequestKey(request_id="r"))
    assert convert.submission_from_message(add, text_fp="").pools


@pytest.mark.parametrize(
    ("add", "param"),
    [
        (pb.Add(), "request_id"),
        (pb.Add(sampling=common_pb2.SamplingParams(logit_bias_ids=[1])), "sampling"),
        (pb.Add(constraint=common_pb2.Constraint(spec="a+")), "constraint"),
        (pb.Add(sampling=common_pb2.SamplingParams(top_p=7.0)), "top_p"),
        (pb.Add(pooling=7), "pooling"),  # type: ignore[arg-type]
        (pooling_add(choices=[]), "pooling"),
        (pooling_add(choices=[pb.AddChoice(handle=1), pb.AddChoice(handle=2)]), "pooling"),
        (pooling_add(choices=[pb.AddChoice(handle=1, resume_ids=[5])]), "pooling"),
        (pooling_add(sampling=common_pb2.SamplingParams(prompt_logprobs=1)), "pooling"),
        (
            pooling_add(
                constraint=common_pb2.Constraint(kind=common_pb2.CONSTRAINT_KIND_REGEX, spec="a")
            ),
            "pooling",
        ),
    ],
)
def test_an_add_that_means_nothing_is_refused_naming_the_field(add: pb.Add, param: str) -> None:
    if param != "request_id":
        add.key.request_id = "r"
    with pytest.raises(InvalidRequest) as caught:
        convert.submission_from_message(add, text_fp="")
    assert caught.value.param == param


def test_an_add_without_a_deadline_or_constraint_has_none() -> None:
    add = pb.Add(key=common_pb2.RequestKey(request_id="r"))
    got = convert.submission_from_message(add, text_fp="")
    assert got.deadline_s is None and got.constraint is None


def test_abort_reasons_are_those_of_the_wire() -> None:
    for reason in AbortReason:
        name = f"ABORT_REASON_{reason.name}"
        assert convert.abort_reason_from_message(pb.AbortReason.Value(name)) is reason
    assert convert.abort_reason_from_message(99) is AbortReason.CLIENT_GONE


def test_finish_reasons_are_those_of_the_wire() -> None:
    for reason in FinishReason:
        assert common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") == reason.value


def test_a_result_is_read_with_its_side_columns() -> None:
    result = worker_pb2.StepResult(
        step=9,
        handle=[1, 2, 3],
        num_sampled=[1, 0, 1],
        token_ids=[10, 30],
        logprobs=common_pb2.Logprobs(
            position=[0, 1],
            logprob=[-1.0, -3.0],
            rank=[1, 3],
            num_top=[2, 1],
            top_ids=[10, 11, 33],
            top_logprobs=[-1.0, -1.5, -0.5],
        ),
        prompt_logprobs=[common_pb2.PromptLogprobs(handle=2, start=1)],
        row_error_handle=[3],
        row_error=[common_pb2.ErrorDetail(error_class="RequestFailed", message="NaN")],
        pooled=[worker_pb2.PooledVector(handle=2, values=b"1234")],
        device_us=1500,
        gap_us=250,
    )
    outcome, side = convert.outcome_from_bytes(result.SerializeToString())
    assert (outcome.step, outcome.handles, outcome.num_sampled) == (9, [1, 2, 3], [1, 0, 1])
    (error,) = outcome.row_errors.values()
    assert list(outcome.row_errors) == [3]
    assert isinstance(error, RequestFailed) and error.message == "NaN"
    assert outcome.pooled == {2: b"1234"}
    assert (outcome.device_s, outcome.gap_s) == (0.0015, 0.00025)
    assert list(outcome.prompt_logprobs) == [2]
    assert outcome.failed is None
    second = side.of(1, 1)
    assert second is not None
    assert list(second.position) == [0]
    assert list(second.top_ids) == [33]
    assert side.of(2, 1) is None


def test_a_failed_step_is_read() -> None:
    result = worker_pb2.StepResult(
        step=9, failed=worker_pb2.StepFailure(error_class="ValueError", message="no")
    )
    outcome, _ = convert.outcome_from_bytes(result.SerializeToString())
    assert outcome.failed == "ValueError: no"


def test_a_decision_is_told_beside_what_came_of_it() -> None:
    finished = Finished(
        handle=1,
        reason=FinishReason.STOP,
        usage=Usage(10, 8, 2, 5, 0),
        life=Life(100.0, 100.5, 101.0, 102.0, 102.0, 0, 0),
    )
    decision = Decision((7, 9), (0, 8), (1.0, 0.25), chosen_engine_id=9, wait_s=0.25)
    message = convert.decision_to_message(decision, finished=finished)
    assert list(message.engine_id) == [7, 9]
    assert message.chosen_engine_id == 9
    assert list(message.predicted_cached_tokens) == [0, 8]
    assert message.actual_cached_tokens == 8
    assert message.actual_wait_s == 0.5


def test_kv_changes_are_packed() -> None:
    card = EngineCard(1, "w", "a:1", "m", "t", "k", block_size=4, num_blocks=9)
    change = KvChange(5, stored=b"a" * 16 + b"b" * 16, removed=b"c" * 16)
    message = convert.kv_change_to_message(change, card, introduces=True)
    assert message.stored == b"a" * 16 + b"b" * 16
    assert message.removed == b"c" * 16
    assert (message.engine_id, message.seq, message.record.worker_id) == (1, 5, "w")
    chunk = KvChange(6, is_snapshot=True, chunk=2, is_last=True)
    message = convert.kv_change_to_message(chunk, card, introduces=False)
    assert (message.snapshot.base_seq, message.snapshot.chunk, message.snapshot.last) == (
        6,
        2,
        True,
    )
    assert not message.HasField("record")
