"""How requests come in, wait and end: every accepted one ends exactly once."""

from __future__ import annotations

import math

import pytest

from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    InvariantError,
    Overloaded,
    RequestFailed,
)
from services.common.sampling import SamplingParams
from services.scheduler.core.output import AbortReason, FinishReason
from services.scheduler.core.request import Request, RequestStatus
from tests.unit.scheduler.core.harness import EOS, Harness, limits


def _abort(
    harness: Harness,
    request: Request,
    reason: AbortReason = AbortReason.CLIENT_GONE,
    *,
    kept_tokens: int | None = None,
) -> bool:
    known = harness.scheduler.abort(
        request.handle, reason=reason, kept_tokens=kept_tokens, now=harness.now
    )
    harness.take_finished()
    harness.check()
    return known


def _error(harness: Harness, request: Request) -> Exception | None:
    finished = harness.seen[request.handle].finished
    assert finished is not None
    return finished.error


# ---- at the door


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    harness = Harness()
    with pytest.raises(ContextLengthExceeded, match=r"128 tokens.*needs 129") as caught:
        harness.add(harness.request([2] * 128, max_tokens=None))
    assert caught.value.param == "prompt"


def test_max_tokens_beyond_the_context_is_refused() -> None:
    harness = Harness()
    with pytest.raises(ContextLengthExceeded) as caught:
        harness.add(harness.request([2] * 100, max_tokens=29))
    assert caught.value.param == "max_tokens"
    harness.add(harness.request([2] * 100, max_tokens=28))


def test_a_request_that_can_never_fit_the_pool_is_refused_at_once() -> None:
    harness = Harness(limits(num_blocks=6))
    with pytest.raises(ContextLengthExceeded, match="KV cache holds 20 tokens"):
        harness.add(harness.request([2] * 15, max_tokens=7))
    assert harness.scheduler.num_unfinished == 0


def test_without_max_tokens_the_output_may_take_what_the_pool_holds() -> None:
    harness = Harness(limits(num_blocks=6))
    request = harness.add(harness.request([2] * 15, max_tokens=None))
    harness.run()
    assert harness.reason(request) is FinishReason.LENGTH
    assert len(harness.tokens(request)) == 6


def test_unknown_token_ids_and_an_empty_prompt_are_refused() -> None:
    harness = Harness()
    with pytest.raises(InvalidRequest, match=r"token id 100 is not in 0\.\.99"):
        harness.add(harness.request([2, 100]))
    with pytest.raises(InvalidRequest, match="empty"):
        harness.add(harness.request([]))


def test_a_priority_is_refused_under_fcfs() -> None:
    harness = Harness(limits(policy="fcfs"))
    with pytest.raises(InvalidRequest) as caught:
        harness.add(harness.request([2], priority=1))
    assert caught.value.param == "priority"


def test_a_handle_in_use_is_refused() -> None:
    harness = Harness()
    request = harness.add(harness.request([2]))
    with pytest.raises(InvariantError, match="in use"):
        harness.scheduler.add([request], now=0.0)


def test_all_choices_are_accepted_or_none() -> None:
    harness = Harness()
    good, bad = harness.request([2, 3]), harness.request([2, 100])
    with pytest.raises(InvalidRequest):
        harness.add(good, bad)
    assert harness.scheduler.num_unfinished == 0


def test_a_full_queue_is_refused_with_a_retry_after_from_the_drain_rate() -> None:
    harness = Harness(limits(max_waiting=20, max_num_seqs=1))
    for second in range(10):  # two requests a second are started
        for _ in range(2):
            harness.add(harness.request([2, 3], max_tokens=1))
            harness.run()
        harness.now = second + 1.0
    for _ in range(20):
        harness.add(harness.request([2, 3], max_tokens=1))
    with pytest.raises(Overloaded) as caught:
        harness.add(harness.request([2, 3]))
    assert caught.value.retry_after_s == pytest.approx(10.0, rel=0.25)
    assert f"try again in {math.ceil(caught.value.retry_after_s)} s" in caught.value.message
    assert "--max-waiting" in caught.value.message
    harness.run()
    harness.assert_all_served()


# ---- in the queue


def test_a_waiting_request_knows_its_place_and_when_it_may_start() -> None:
    harness = Harness(limits(max_num_seqs=1))
    for second in range(20):
        harness.add(harness.request([2, 3], max_tokens=1))
        harness.run()
        harness.now = second + 1.0
    requests = [harness.add(harness.request([2, 3])) for _ in range(4)]
    harness.step()
    places = [harness.scheduler.queue_position(r.handle, now=harness.now) for r in requests]
    assert places[0] is None, "it runs"
    assert [place.position for place in places if place] == [0, 1, 2]
    etas = [place.eta_s for place in places if place]
    assert etas == sorted(etas) and etas[2] == pytest.approx(3.0, rel=0.2)


def test_with_free_seats_the_eta_is_now() -> None:
    harness = Harness()
    request = harness.add(harness.request([2, 3]))
    place = harness.scheduler.queue_position(request.handle, now=0.0)
    assert place is not None and (place.position, place.eta_s) == (0, 0.0)


def test_lower_priority_runs_first_and_ties_in_order_of_arrival() -> None:
    harness = Harness(limits(max_num_seqs=1))
    order = []
    for arrival_s, priority in ((0.0, 2), (1.0, 0), (2.0, 0), (3.0, -1)):
        harness.now = arrival_s
        order.append(harness.add(harness.request([2, 3], priority=priority, max_tokens=1)).handle)
    harness.run()
    ran = [plan.handles[0] for plan in harness.plans if plan.handles]
    assert ran == [order[3], order[1], order[2], order[0]]


def test_a_request_of_low_priority_does_not_starve_behind_a_stream_of_urgent_ones() -> None:
    harness = Harness(limits(max_num_seqs=1, priority_aging_s=10.0))
    patient = harness.add(harness.request([2, 3], priority=2, max_tokens=1))
    for _ in range(100):
        harness.add(harness.request([4, 5], priority=0, max_tokens=1))
        harness.add(harness.request([6, 7], priority=0, max_tokens=1))
        harness.step()
        harness.now += 1.0
        if harness.reason(patient) is not None:
            break
    assert harness.reason(patient) is FinishReason.LENGTH
    assert 20.0 <= harness.now < 60.0


def test_a_request_that_does_not_fit_is_not_passed_by_a_smaller_one() -> None:
    harness = Harness(limits(num_blocks=13, enable_prefix_caching=False))
    harness.add(harness.request([2] * 30, max_tokens=3))
    harness.step()
    large = harness.add(harness.request([3] * 30, max_tokens=1))
    small = harness.add(harness.request([4], max_tokens=1))
    harness.step()
    assert small.status is large.status is RequestStatus.WAITING
    harness.run()
    harness.assert_all_served()


def test_a_deadline_that_passes_in_the_queue_ends_the_request_with_an_error() -> None:
    harness = Harness(limits(max_num_seqs=1))
    running = harness.add(harness.request([2, 3], max_tokens=20, deadline_s=1.0))
    waiting = harness.add(harness.request([4, 5], deadline_s=1.0))
    harness.step()
    assert harness.scheduler.next_expiry() == 1.0
    harness.now = 1.0
    harness.step()
    assert harness.reason(waiting) is FinishReason.ERROR
    assert isinstance(_error(harness, waiting), DeadlineExceeded)
    assert harness.reason(running) is None, "it is being served"
    harness.run()
    harness.assert_all_served()


# ---- set aside


def test_a_request_that_waits_for_its_grammar_holds_up_nobody_and_takes_no_place() -> None:
    harness = Harness(limits(max_num_seqs=1))
    aside = harness.add(harness.request([2, 3], needs_prepare=True))
    other = harness.add(harness.request([4, 5], max_tokens=1))
    harness.step()
    assert aside.status is RequestStatus.WAITING_FOR_PREPARE
    assert harness.reason(other) is FinishReason.LENGTH
    harness.scheduler.prepared(aside.handle, error=None, now=harness.now)
    harness.run()
    harness.assert_all_served()
    assert harness.reason(aside) is FinishReason.LENGTH


def test_a_prepared_request_takes_its_place_by_arrival() -> None:
    harness = Harness(limits(max_num_seqs=1))
    early = harness.add(harness.request([2, 3], needs_prepare=True))
    harness.now = 1.0
    later = harness.add(harness.request([4, 5]))
    harness.scheduler.prepared(early.handle, error=None, now=1.0)
    harness.step()
    assert harness.plans[0].handles == [early.handle]
    assert later.status is RequestStatus.WAITING


def test_a_failed_preparation_ends_that_request_alone() -> None:
    harness = Harness()
    bad = harness.add(harness.request([2, 3], needs_prepare=True))
    good = harness.add(harness.request([4, 5]))
    harness.scheduler.prepared(bad.handle, error=InvalidRequest("no such rule"), now=0.0)
    harness.scheduler.prepared(999, error=None, now=0.0)
    harness.run()
    harness.assert_all_served()
    assert isinstance(_error(harness, bad), InvalidRequest)
    assert harness.reason(good) is FinishReason.LENGTH


def test_after_five_seconds_without_its_grammar_that_request_ends_with_an_error() -> None:
    harness = Harness()
    request = harness.add(harness.request([2, 3], needs_prepare=True))
    assert harness.scheduler.next_expiry() == 5.0
    harness.now = 4.9
    harness.scheduler.expire(now=harness.now)
    assert harness.take_finished() == []
    harness.now = 5.0
    harness.scheduler.expire(now=harness.now)
    harness.take_finished()
    assert isinstance(_error(harness, request), RequestFailed)
    harness.assert_all_served()


# ---- aborts


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_an_aborted_request_ends_at_once_and_never_emits_again(
    depth: int, steps_before: int
) -> None:
    harness = Harness(limits(pipeline_depth=depth, max_num_batched_tokens=8))
    request = harness.add(harness.request(list(range(2, 22)), max_tokens=9))
    for _ in range(steps_before):
        harness.step()
    harness.plan()
    assert _abort(harness, request)
    assert harness.reason(request) is FinishReason.ABORT
    assert harness.scheduler.load().kv_blocks_used == 0
    assert not _abort(harness, request), "idempotent"
    harness.run()
    harness.assert_all_served()


def test_an_abort_while_the_last_step_runs_is_an_abort() -> None:
    harness = Harness()
    request = harness.add(harness.request([2, 3], max_tokens=1))
    harness.plan()
    _abort(harness, request)
    update = harness.receive()
    assert update.token_ids == [] and update.finished == []
    assert harness.reason(request) is FinishReason.ABORT


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_of_an_aborted_request_may_be_given_out_in_the_very_next_step(depth: int) -> None:
    harness = Harness(limits(num_blocks=9, pipeline_depth=depth, enable_prefix_caching=False))
    first = harness.add(harness.request([2] * 28, max_tokens=4))
    second = harness.add(harness.request([3] * 28, max_tokens=4))
    harness.step()
    _abort(harness, first)
    harness.plan()
    assert second.status is RequestStatus.RUNNING
    harness.run()
    harness.assert_all_served()


def test_a_stop_string_finishes_as_stop_and_counts_kept_and_wasted_tokens_apart() -> None:
    harness = Harness()
    request = harness.add(harness.request([2, 3, 4], max_tokens=20))
    for _ in range(6):
        harness.step()
    _abort(harness, request, AbortReason.STOP_STRING, kept_tokens=4)
    finished = harness.seen[request.handle].finished
    assert finished is not None and finished.reason is FinishReason.STOP
    assert finished.usage.output_tokens == 4
    assert finished.usage.computed_tokens == 3 + 5
    assert finished.usage.wasted_tokens == 2


def test_an_abort_for_the_deadline_is_a_deadline_error() -> None:
    harness = Harness()
    request = harness.add(harness.request([2, 3]))
    _abort(harness, request, AbortReason.DEADLINE)
    assert isinstance(_error(harness, request), DeadlineExceeded)


# ---- resumed output


def test_resumed_output_is_history_and_only_what_follows_is_sent() -> None:
    whole = Harness()
    expected = whole.add(whole.request([2, 3, 4], max_tokens=8))
    whole.run()
    harness = Harness(limits(pipeline_depth=2))
    resumed = harness.request([2, 3, 4], max_tokens=8, resume_ids=whole.tokens(expected)[:5])
    harness.add(resumed)
    update = harness.step()
    assert update is not None and update.offsets == [5]
    harness.run()
    harness.assert_all_served()
    finished = harness.seen[resumed.handle].finished
    assert finished is not None and finished.usage.output_tokens == 8
    assert finished.usage.computed_tokens == 3 + 8 - 1


@pytest.mark.parametrize(
    ("resume_ids", "reason"),
    [([5, EOS], FinishReason.STOP), ([5, 6, 7, 8], FinishReason.LENGTH)],
)
def test_resumed_output_that_holds_its_end_finishes_without_running(
    resume_ids: list[int], reason: FinishReason
) -> None:
    harness = Harness()
    sampling = SamplingParams(max_tokens=4)
    request = harness.add(harness.request([2, 3], sampling=sampling, resume_ids=resume_ids))
    harness.take_finished()
    assert harness.reason(request) is reason
    assert harness.plan() is None and harness.scheduler.num_unfinished == 0


# ---- what is told at the end


def test_the_life_of_a_request_has_the_times_that_were_passed_in() -> None:
    harness = Harness(limits(max_num_seqs=1))
    harness.step_s = 1.0
    harness.add(harness.request([2, 3], max_tokens=2))
    request = harness.add(harness.request([4, 5], max_tokens=3, attempt=1))
    harness.run()
    finished = harness.seen[request.handle].finished
    assert finished is not None
    life = finished.life
    assert (life.arrival_s, life.first_scheduled_s) == (0.0, 2.0)
    assert (life.first_token_s, life.last_token_s, life.finished_s) == (3.0, 5.0, 5.0)
    assert (life.num_preemptions, life.attempt) == (0, 1)


def test_load_counts_what_happened() -> None:
    harness = Harness(limits(max_num_seqs=1))
    harness.step_s = 0.01
    harness.add(harness.request([2, 3, 4], max_tokens=2))
    aborted = harness.add(harness.request([5, 6], max_tokens=2))
    load = harness.scheduler.load()
    assert (load.running, load.waiting, load.waiting_uncached_tokens) == (0, 2, 5)
    harness.step()
    load = harness.scheduler.load()
    assert (load.running, load.waiting, load.kv_blocks_used) == (1, 1, 1)
    _abort(harness, aborted)
    harness.run()
    load = harness.scheduler.load()
    assert (load.generated_tokens, load.prompt_tokens) == (2, 3)
    assert (load.finished_length, load.finished_abort) == (1, 1)
    assert (load.kv_blocks_used, load.kv_blocks_total) == (0, 64)
    assert load.prefill_tok_s == pytest.approx(300.0)
    assert load.decode_tok_s == pytest.approx(100.0)


# ---- moving to another engine


def test_a_lost_engine_gives_back_its_requests_in_order_and_they_go_on_elsewhere() -> None:
    lost = Harness(limits(max_num_seqs=2, pipeline_depth=2))
    requests = []
    for second in range(3):
        lost.now = float(second)
        requests.append(lost.add(lost.request([2 + second, 3], max_tokens=8)))
    ended = lost.add(lost.request([9, 9], max_tokens=1))
    _abort(lost, ended)
    for _ in range(3):
        lost.step()
    lost.plan()
    returned = lost.scheduler.lose_engine()
    assert returned == requests
    assert [request.crashes for request in returned] == [1, 1, 0], "two were in flight"
    assert [request.arrival_s for request in returned] == [0.0, 1.0, 2.0]
    other = Harness()
    for request in returned:
        other.add(request)
    other.run()
    other.assert_all_served()


def test_a_request_that_saw_two_engines_die_runs_alone() -> None:
    harness = Harness()
    harness.add(harness.request([2, 3], max_tokens=3))
    harness.step()
    suspect = harness.add(harness.request([4, 5], max_tokens=3, crashes=2))
    harness.add(harness.request([6, 7], max_tokens=3))
    harness.run()
    harness.assert_all_served()
    for plan in harness.plans:
        if suspect.handle in plan.handles:
            assert plan.handles == [suspect.handle]


def test_a_waiting_request_may_be_moved_and_a_running_one_may_not() -> None:
    harness = Harness(limits(max_num_seqs=1))
    running = harness.add(harness.request([2, 3]))
    waiting = harness.add(harness.request([4, 5]))
    harness.step()
    assert harness.scheduler.withdraw(running.handle) is None
    assert harness.scheduler.withdraw(waiting.handle) is waiting
    harness.check()
    other = Harness()
    other.add(waiting)
    other.run()
    other.assert_all_served()
    del harness.seen[waiting.handle]
    harness.run()
    harness.assert_all_served()
