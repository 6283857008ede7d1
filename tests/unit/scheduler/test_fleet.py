"""Placement, loss, drain and supersession, without a network (see ``loopback``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.errors import (
    InvalidRequest,
    ModelNotFound,
    RequestFailed,
    Unavailable,
    WorkerLost,
)
from services.common.pb import worker_pb2 as pb
from services.common.sampling import Constraint, ConstraintKind, SamplingParams
from services.scheduler.core.output import AbortReason, FinishReason
from services.scheduler.fleet import MAX_CRASHES
from services.scheduler.lives import EngineState
from tests.fakes.worker import FakeWorkerSpec, expected_output
from tests.unit.scheduler.loopback import GREEDY, Loopback, settle

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture
async def here() -> AsyncIterator[Loopback]:
    """A fleet; at the end the rules are checked and its engines end."""
    async with asyncio.TaskGroup() as tasks:
        here = Loopback(tasks)
        yield here
        here.check()
        here.close()


async def test_every_request_gets_its_own_tokens_and_one_finish(here: Loopback) -> None:
    here.attach()
    prompts = [[10 * i + 1, 10 * i + 2] for i in range(40)]
    handles = [here.submit(prompt)[0].handle for prompt in prompts]
    await here.sink.wait_finished(*handles)
    for handle, prompt in zip(handles, prompts, strict=True):
        assert here.sink.tokens_of[handle] == expected_output(prompt, 4)
        assert here.sink.finished_of[handle].reason is FinishReason.LENGTH


async def test_steps_in_flight_never_exceed_the_depth_and_reach_it(here: Loopback) -> None:
    link = here.attach(is_held=True)
    here.submit([1, 2, 3], LONG)
    await settle()
    most = link.num_unanswered
    for _ in range(20):
        link.answer()
        here.now += 0.001
        await settle()
        most = max(most, link.num_unanswered)
    assert most == 2


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_an_abort_frees_the_blocks_at_once(here: Loopback, phase: str) -> None:
    link = here.attach(FakeWorkerSpec(max_num_seqs=1, max_num_batched_tokens=8), is_held=True)
    engine = link.attachment.running_engine()
    if phase == "queue":
        (other,) = here.submit([1, 2], LONG)
        await settle()
    (ticket,) = here.submit(list(range(1, 40)), LONG)
    await settle()
    if phase == "decode":
        for _ in range(12):
            link.answer()
            await settle()
        assert ticket.handle in here.sink.tokens_of
    used_before = engine.load().kv_blocks_used
    here.fleet.abort(ticket, reason=AbortReason.CLIENT_GONE)
    assert here.sink.finished_of[ticket.handle].reason is FinishReason.ABORT
    if phase == "queue":
        assert engine.load().kv_blocks_used == used_before
        assert engine.load().waiting == 0
        here.fleet.abort(other, reason=AbortReason.CLIENT_GONE)
    assert engine.load().kv_blocks_used == 0
    link.is_held = False
    while link.num_unanswered:
        link.answer()
        await settle()
    await settle()
    assert link.executor.num_rows == 0, "the worker was told to drop the row"


async def test_an_aborted_handle_gets_nothing_after_its_finish(here: Loopback) -> None:
    link = here.attach(is_held=True)
    (ticket,) = here.submit([1, 2], LONG)
    await settle()
    link.answer()
    await settle()
    here.fleet.abort(ticket, reason=AbortReason.CLIENT_GONE)
    told = list(here.sink.tokens_of.get(ticket.handle, []))
    while link.num_unanswered:
        link.answer()
        await settle()
    here.fleet.abort(ticket, reason=AbortReason.CLIENT_GONE)
    assert here.sink.tokens_of.get(ticket.handle, []) == told


async def test_without_a_worker_a_request_ends_unavailable(here: Loopback) -> None:
    (ticket,) = here.submit([1, 2])
    error = here.sink.finished_of[ticket.handle].error
    assert isinstance(error, Unavailable)
    assert error.retry_after_s
    here.attach(is_ready=False)
    (ticket,) = here.submit([1, 2])
    assert "loading" in str(here.sink.finished_of[ticket.handle].error)
    assert not here.fleet.is_ready


async def test_a_request_of_a_lost_engine_ends_worker_lost_if_there_is_no_other(
    here: Loopback,
) -> None:
    link = here.attach(is_held=True)
    (ticket,) = here.submit([1, 2], LONG)
    await settle()
    here.fleet.detach(link.attachment, reason="it died")
    error = here.sink.finished_of[ticket.handle].error
    assert isinstance(error, WorkerLost)
    assert "it died" in error.message
    assert not here.fleet.is_ready
    assert here.fleet.num_tickets == 0


async def test_a_request_of_a_lost_engine_goes_on_elsewhere_with_the_same_tokens(
    here: Loopback,
) -> None:
    first = here.attach(is_held=True)
    (ticket,) = here.submit([1, 2], LONG)
    await settle()
    for _ in range(6):
        first.answer()
        await settle()
    assert here.sink.tokens_of[ticket.handle]
    here.attach()
    here.fleet.detach(first.attachment, reason="it died")
    await here.sink.wait_finished(ticket.handle)
    assert here.sink.tokens_of[ticket.handle] == expected_output([1, 2], 40)
    assert here.sink.finished_of[ticket.handle].reason is FinishReason.LENGTH


async def test_a_request_that_kills_engines_is_not_run_for_ever(here: Loopback) -> None:
    for _ in range(2):
        here.attach(is_held=True)
    (ticket,) = here.submit([1, 2], LONG, crashes=MAX_CRASHES - 1)
    await settle()
    victim = next(one for one in here.links if one.plans)
    here.fleet.detach(victim.attachment, reason="it died")
    assert isinstance(here.sink.finished_of[ticket.handle].error, RequestFailed)


async def test_a_worker_that_attaches_again_ends_its_older_engine(here: Loopback) -> None:
    spec = FakeWorkerSpec(worker_id="w")
    old = here.attach(spec, engine_id=1, is_held=True)
    (ticket,) = here.submit([1, 2], LONG)
    await settle()
    here.attach(spec, engine_id=2)
    assert isinstance(old.closed_with[0], WorkerLost)
    assert old.attachment.state is EngineState.GONE
    assert isinstance(here.sink.finished_of[ticket.handle].error, WorkerLost)
    (ticket,) = here.submit([1, 2])
    await here.sink.wait_finished(ticket.handle)
    assert here.sink.tokens_of[ticket.handle] == expected_output([1, 2], 4)


async def test_an_engine_id_is_used_once(here: Loopback) -> None:
    here.attach(FakeWorkerSpec(worker_id="a"), engine_id=7)
    with pytest.raises(InvalidRequest, match="engine_id 7"):
        here.attach(FakeWorkerSpec(worker_id="b"), engine_id=7)


async def test_a_request_for_another_tokenizer_is_refused_naming_both_fingerprints(
    here: Loopback,
) -> None:
    here.attach(FakeWorkerSpec(text_fp="of-the-worker"))
    (ticket,) = here.submit([1, 2], text_fp="of-the-tokenizer")
    error = here.sink.finished_of[ticket.handle].error
    assert isinstance(error, Unavailable)
    assert "of-the-worker" in error.message and "of-the-tokenizer" in error.message


async def test_an_unknown_model_is_refused_naming_those_that_exist(here: Loopback) -> None:
    here.attach()
    (ticket,) = here.submit([1, 2], model="other")
    error = here.sink.finished_of[ticket.handle].error
    assert isinstance(error, ModelNotFound)
    assert "fake" in error.message


async def test_bad_token_ids_are_refused_and_the_next_request_is_served(here: Loopback) -> None:
    here.attach()
    (bad,) = here.submit([1, 100_000])
    assert isinstance(here.sink.finished_of[bad.handle].error, InvalidRequest)
    (good,) = here.submit([1, 2])
    await here.sink.wait_finished(good.handle)
    assert here.sink.tokens_of[good.handle] == expected_output([1, 2], 4)


async def test_a_higher_attempt_supersedes_and_a_lower_one_is_refused(here: Loopback) -> None:
    link = here.attach(is_held=True)
    (first,) = here.submit([1, 2], LONG, request_id="r", attempt=1)
    await settle()
    (lower,) = here.submit([1, 2], LONG, request_id="r", attempt=0)
    (same,) = here.submit([1, 2], LONG, request_id="r", attempt=1)
    for refused in (lower, same):
        assert isinstance(here.sink.finished_of[refused.handle].error, InvalidRequest)
    assert first.handle not in here.sink.finished_of
    (second,) = here.submit([1, 2], GREEDY, request_id="r", attempt=2)
    assert here.sink.finished_of[first.handle].reason is FinishReason.ABORT
    link.is_held = False
    while link.num_unanswered:
        link.answer()
        await settle()
    await here.sink.wait_finished(second.handle)
    (late,) = here.submit([1, 2], GREEDY, request_id="r", attempt=1)
    assert isinstance(here.sink.finished_of[late.handle].error, InvalidRequest)


async def test_requests_spread_over_engines_by_cost(here: Loopback) -> None:
    one, two = here.attach(is_held=True), here.attach(is_held=True)
    for i in range(8):
        here.submit([i + 1, i + 2], LONG)
    await settle()
    shares = [link.attachment.running_engine().num_tickets for link in (one, two)]
    assert shares == [4, 4]


async def test_a_cached_prefix_draws_a_request_to_its_engine(here: Loopback) -> None:
    one, two = here.attach(), here.attach()
    prompt = list(range(1, 41))
    (first,) = here.submit(prompt)
    await here.sink.wait_finished(first.handle)
    await settle()
    holder = one if one.plans else two
    (second,) = here.submit([*prompt, 77])
    await here.sink.wait_finished(second.handle)
    decision = second.decision
    assert decision is not None
    assert decision.chosen_engine_id == holder.attachment.engine_id
    assert max(decision.cached_tokens) == 40
    assert here.sink.finished_of[second.handle].usage.cached_tokens == 40


async def test_a_waiting_request_moves_to_an_engine_that_is_idle(here: Loopback) -> None:
    busy = here.attach(FakeWorkerSpec(worker_id="a", max_num_seqs=1), is_held=True)
    here.submit([1, 2], LONG)
    (waiting,) = here.submit([3, 4])
    await settle()
    assert waiting.handle in here.sink.queued_of and waiting.handle not in here.sink.tokens_of
    here.attach(FakeWorkerSpec(worker_id="b"))
    here.fleet.tick()
    await here.sink.wait_finished(waiting.handle)
    assert here.sink.tokens_of[waiting.handle] == expected_output([3, 4], 4)
    assert busy.attachment.running_engine().num_tickets == 1


async def test_a_request_that_the_best_engine_refuses_goes_to_the_next(here: Loopback) -> None:
    here.attach(FakeWorkerSpec(worker_id="small", num_blocks=5))
    here.attach(FakeWorkerSpec(worker_id="large"))
    here.submit([1, 2], LONG)  # too long for the small one: the large one costs more from now on
    prompt = list(range(1, 60))
    (ticket,) = here.submit(prompt)
    await here.sink.wait_finished(ticket.handle)
    assert here.sink.tokens_of[ticket.handle] == expected_output(prompt, 4)


async def test_a_waiting_request_that_an_idle_engine_cannot_take_stays(here: Loopback) -> None:
    busy = here.attach(FakeWorkerSpec(worker_id="a", max_num_seqs=1), is_held=True)
    here.submit([1, 2], LONG)
    (waiting,) = here.submit(list(range(1, 60)))
    await settle()
    here.attach(FakeWorkerSpec(worker_id="small", num_blocks=5))
    here.fleet.tick()
    assert waiting.handle not in here.sink.finished_of
    assert busy.attachment.running_engine().num_tickets == 2
    here.fleet.drain_engine(busy.attachment)
    assert waiting.handle not in here.sink.finished_of
    assert busy.attachment.running_engine().num_tickets == 2


async def test_those_that_wait_hear_where_they_stand(here: Loopback) -> None:
    here.attach(FakeWorkerSpec(max_num_seqs=1), is_held=True)
    here.submit([1, 2], LONG)
    await settle()
    (second,), (third,) = here.submit([3, 4], LONG), here.submit([5, 6], LONG)
    assert here.sink.queued_of[third.handle] == [1]
    here.fleet.abort(second, reason=AbortReason.CLIENT_GONE)
    here.now += 2
    here.fleet.tick()
    assert here.sink.queued_of[third.handle] == [1, 0]


async def test_a_draining_worker_finishes_what_runs_gets_nothing_new_and_may_leave(
    here: Loopback,
) -> None:
    link = here.attach(is_held=True)
    (running,) = here.submit([1, 2])
    await settle()
    here.fleet.drain_engine(link.attachment)
    (refused,) = here.submit([5, 6])
    assert isinstance(here.sink.finished_of[refused.handle].error, Unavailable)
    assert not link.is_drained
    link.is_held = False
    while link.num_unanswered:
        link.answer()
        await settle()
    await here.sink.wait_finished(running.handle)
    assert here.sink.finished_of[running.handle].reason is FinishReason.LENGTH
    await settle()
    here.fleet.tick()
    assert link.is_drained
    here.fleet.on_drained(link.attachment)
    assert link.closed_with[0] is None, "a drained worker's stream ends well"


async def test_a_draining_scheduler_refuses_new_requests_and_empties(here: Loopback) -> None:
    link = here.attach(is_held=True)
    (running,) = here.submit([1, 2])
    await settle()
    here.fleet.drain_all()
    assert not here.fleet.is_ready
    (refused,) = here.submit([5, 6])
    assert isinstance(here.sink.finished_of[refused.handle].error, Unavailable)
    link.is_held = False
    while link.num_unanswered:
        link.answer()
        await settle()
    async with asyncio.timeout(30):
        await here.fleet.wait_until_empty()
    assert here.sink.finished_of[running.handle].reason is FinishReason.LENGTH


async def test_a_fleet_that_is_abandoned_ends_every_request_so_that_it_can_be_resumed(
    here: Loopback,
) -> None:
    links = [here.attach(is_held=True) for _ in range(MAX_CRASHES)]
    tickets = [here.submit([i + 1, i + 2], LONG)[0] for i in range(6)]
    await settle()
    here.fleet.abandon_all("the scheduler stops")
    assert all(link.closed_with for link in links)
    for ticket in tickets:
        assert isinstance(here.sink.finished_of[ticket.handle].error, WorkerLost)


async def test_a_stalled_engine_is_no_progress_and_recovers(here: Loopback) -> None:
    link = here.attach(is_held=True)
    (ticket,) = here.submit([1, 2])
    await settle()
    here.now += 11
    here.fleet.tick()
    assert link.attachment.state is EngineState.STALLED
    assert not here.fleet.is_progressing and not here.fleet.is_ready
    link.is_held = False
    while link.num_unanswered:
        link.answer()
        await settle()
    here.fleet.tick()
    assert link.attachment.state is EngineState.READY
    assert here.fleet.is_progressing and here.fleet.is_ready
    await here.sink.wait_finished(ticket.handle)
    assert here.sink.tokens_of[ticket.handle] == expected_output([1, 2], 4)


async def test_requests_of_a_stalled_engine_move_if_there_is_another(here: Loopback) -> None:
    stalled = here.attach(is_held=True)
    (ticket,) = here.submit([1, 2])
    await settle()
    here.attach()
    here.now += 11
    here.fleet.tick()
    assert stalled.attachment.state is EngineState.GONE
    await here.sink.wait_finished(ticket.handle)
    assert here.sink.tokens_of[ticket.handle] == expected_output([1, 2], 4)


async def test_a_failed_step_costs_the_guilty_request_only(here: Loopback) -> None:
    here.attach(FakeWorkerSpec(bad_step_token=500))
    good = [here.submit([i + 1, i + 2])[0] for i in range(5)]
    (bad,) = here.submit([3, 500])
    await here.sink.wait_finished(bad.handle, *(ticket.handle for ticket in good))
    assert isinstance(here.sink.finished_of[bad.handle].error, RequestFailed)
    for i, ticket in enumerate(good):
        assert here.sink.tokens_of[ticket.handle] == expected_output([i + 1, i + 2], 4)


async def test_a_row_error_costs_its_own_request_only(here: Loopback) -> None:
    here.attach(FakeWorkerSpec(bad_row_token=500))
    good = [here.submit([i + 1, i + 2])[0] for i in range(5)]
    (bad,) = here.submit([3, 500])
    await here.sink.wait_finished(bad.handle, *(ticket.handle for ticket in good))
    assert isinstance(here.sink.finished_of[bad.handle].error, RequestFailed)
    for i, ticket in enumerate(good):
        assert here.sink.tokens_of[ticket.handle] == expected_output([i + 1, i + 2], 4)


async def test_results_out_of_order_cost_that_engine_only(here: Loopback) -> None:
    one = here.attach(FakeWorkerSpec(worker_id="a"), is_held=True)
    (ticket,) = here.submit([1, 2])
    await settle()
    here.attach(FakeWorkerSpec(worker_id="b"))
    one.answer_with(pb.StepResult(step=99))
    await settle()
    assert one.attachment.state is EngineState.GONE
    await here.sink.wait_finished(ticket.handle)
    assert here.sink.tokens_of[ticket.handle] == expected_output([1, 2], 4)


async def test_choices_share_the_prompt_and_each_ends_once(here: Loopback) -> None:
    link = here.attach()
    prompt = list(range(1, 34))
    tickets = here.submit(prompt, num_choices=3)
    await here.sink.wait_finished(*(ticket.handle for ticket in tickets))
    for ticket in tickets:
        assert here.sink.tokens_of[ticket.handle] == expected_output(prompt, 4)
    assert link.executor.num_tokens_run < 2 * len(prompt)


async def test_a_grammar_is_prepared_once_shared_and_released(here: Loopback) -> None:
    link = here.attach()
    engine = link.attachment.running_engine()
    constraint = Constraint(ConstraintKind.REGEX, "a+")
    one = here.submit([1, 2], constraint=constraint)[0]
    two = here.submit([3, 4], constraint=constraint)[0]
    free = here.submit([5, 6])[0]
    await here.sink.wait_finished(free.handle)
    assert one.handle not in here.sink.tokens_of, "it waits for its grammar, the others do not"
    assert link.prepares == [1]
    engine.on_prepared(1, None)
    await here.sink.wait_finished(one.handle, two.handle)
    assert link.released == [1]
    assert here.sink.tokens_of[one.handle] == expected_output([1, 2], 4)


async def test_a_grammar_that_fails_ends_its_requests_only(here: Loopback) -> None:
    link = here.attach()
    constraint = Constraint(ConstraintKind.REGEX, "a+")
    (ticket,) = here.submit([1, 2], constraint=constraint)
    link.attachment.running_engine().on_prepared(1, InvalidRequest("bad grammar"))
    error = here.sink.finished_of[ticket.handle].error
    assert error is not None and error.message == "bad grammar"
    (free,) = here.submit([5, 6])
    await here.sink.wait_finished(free.handle)


async def test_a_grammar_that_is_never_prepared_ends_its_request_after_its_time(
    here: Loopback,
) -> None:
    here.attach()
    (ticket,) = here.submit([1, 2], constraint=Constraint(ConstraintKind.REGEX, "a+"))
    here.now += 6
    (free,) = here.submit([5, 6])
    await here.sink.wait_finished(free.handle)
    assert here.sink.finished_of[ticket.handle].reason is FinishReason.ERROR


async def test_resumed_tokens_count_as_history_and_are_not_sent_again(here: Loopback) -> None:
    here.attach()
    (ticket,) = here.submit([1, 2], GREEDY, resume_ids=[3, 4], attempt=1)
    await here.sink.wait_finished(ticket.handle)
    assert here.sink.tokens_of[ticket.handle] == [5, 6]
    assert here.sink.finished_of[ticket.handle].usage.output_tokens == 4
