"""What runs in a step: budget, order, chunks, preemption, pipelining."""

from __future__ import annotations

import pytest

from services.common.errors import InvariantError
from services.common.sampling import SamplingParams
from services.scheduler.core.output import FinishReason, StepOutcome
from tests.unit.scheduler.core.harness import EOS, Harness, limits

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def _prompt(length: int, *, start: int = 2) -> list[int]:
    return [start + i % 90 for i in range(length)]


@DEPTHS
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_exactly_prompt_plus_max_tokens_minus_one_tokens_are_scheduled(
    depth: int, max_tokens: int
) -> None:
    harness = Harness(limits(pipeline_depth=depth))
    request = harness.add(harness.request(_prompt(10), max_tokens=max_tokens))
    harness.run()
    harness.assert_all_served()
    assert harness.device.num_tokens_run == 10 + max_tokens - 1
    usage = harness.seen[request.handle].finished
    assert usage is not None
    assert (usage.usage.computed_tokens, usage.usage.wasted_tokens) == (10 + max_tokens - 1, 0)


def test_every_depth_gives_the_same_tokens() -> None:
    outputs = []
    for depth in (1, 2, 3):
        harness = Harness(limits(pipeline_depth=depth))
        requests = [harness.add(harness.request(_prompt(n), max_tokens=6)) for n in (3, 9, 17)]
        harness.run()
        harness.assert_all_served()
        outputs.append([harness.tokens(request) for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]


def test_as_many_steps_as_the_depth_are_in_flight_and_no_more() -> None:
    harness = Harness(limits(pipeline_depth=3))
    harness.add(harness.request(_prompt(4), max_tokens=9))
    assert [harness.plan() is not None for _ in range(4)] == [True, True, True, False]
    assert harness.scheduler.num_in_flight == 3
    harness.receive()
    assert harness.plan() is not None


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_after_the_last() -> None:
    harness = Harness(limits(max_num_batched_tokens=16))
    request = harness.add(harness.request(_prompt(40), max_tokens=2))
    chunks = []
    while harness.reason(request) is None:
        update = harness.step()
        assert update is not None
        chunks.append((harness.plans[-1].num_tokens, len(update.token_ids)))
    assert chunks == [([16], 0), ([16], 0), ([8], 1), ([1], 1)]


def test_running_requests_go_before_waiting_ones() -> None:
    harness = Harness(limits(max_num_batched_tokens=16))
    first = harness.add(harness.request(_prompt(20)))
    harness.step()
    harness.add(harness.request(_prompt(20, start=50)))
    harness.step()
    plan = harness.plans[-1]
    assert plan.handles[0] == first.handle and plan.num_tokens == [4, 12]


def test_decoding_requests_keep_their_token_beside_a_prompt_that_ranks_before_them() -> None:
    harness = Harness(limits(max_num_batched_tokens=8, policy="priority"))
    harness.add(harness.request(_prompt(3), max_tokens=20))
    harness.step()
    urgent = harness.add(harness.request(_prompt(30, start=50), priority=-5))
    harness.step()
    harness.step()
    plan = harness.plans[-1]
    assert plan.handles[0] == urgent.handle and plan.num_tokens == [7, 1]


def test_no_more_than_max_num_seqs_run() -> None:
    harness = Harness(limits(max_num_seqs=2))
    for start in (2, 20, 40):
        harness.add(harness.request(_prompt(3, start=start)))
    harness.step()
    assert len(harness.plans[-1].handles) == 2
    harness.run()
    harness.assert_all_served()


def test_the_long_prefill_threshold_leaves_room_for_others() -> None:
    harness = Harness(limits(long_prefill_token_threshold=10))
    harness.add(harness.request(_prompt(40)))
    harness.add(harness.request(_prompt(20, start=50)))
    harness.step()
    assert harness.plans[0].num_tokens == [10, 10]


def test_a_step_time_target_cuts_a_long_prompt_while_others_decode() -> None:
    harness = Harness(limits(step_time_target_s=0.02, max_num_batched_tokens=64))
    harness.step_s = 0.01
    harness.add(harness.request(_prompt(10), max_tokens=30))
    for _ in range(5):
        harness.step()
    long = harness.add(harness.request(_prompt(60, start=40)))
    harness.step()
    # 10 ms of decoding leave 10 ms, and a prompt token has been seen to take 1 ms.
    assert harness.plans[-1].num_tokens == [1, 10]
    harness.run()
    harness.assert_all_served()
    assert harness.reason(long) is FinishReason.LENGTH


def test_who_waits_for_a_seat_does_not_stretch_the_steps_of_those_that_run() -> None:
    chunks = []
    for backlog in (0, 20):
        harness = Harness(
            limits(step_time_target_s=0.02, max_num_batched_tokens=64, max_num_seqs=2)
        )
        harness.step_s = 0.01
        harness.add(harness.request(_prompt(10), max_tokens=30))
        for _ in range(5):
            harness.step()
        for number in range(1 + backlog):
            harness.add(harness.request(_prompt(60, start=20 + number)))
        harness.step()
        chunks.append(harness.plans[-1].num_tokens)
    assert chunks == [[1, 10], [1, 10]]


@DEPTHS
def test_preemption_takes_the_last_of_the_running_returns_all_its_blocks_and_resumes_it_first(
    depth: int,
) -> None:
    harness = Harness(limits(num_blocks=11, pipeline_depth=depth, enable_prefix_caching=False))
    first = harness.add(harness.request(_prompt(14), max_tokens=20))
    harness.now = 1.0
    second = harness.add(harness.request(_prompt(14, start=50), max_tokens=20))
    harness.now = 2.0
    third = harness.add(harness.request(_prompt(21), max_tokens=2))
    harness.run()
    harness.assert_all_served()
    assert first.num_preemptions == 0 and second.num_preemptions >= 1
    admitted = [new.handle for plan in harness.plans for new in plan.new_rows]
    assert admitted.count(second.handle) == 1 + second.num_preemptions
    last_admission = len(admitted) - 1 - admitted[::-1].index(second.handle)
    assert third.handle not in admitted[:last_admission], "it came later and may not pass"
    finished = harness.seen[second.handle].finished
    assert finished is not None
    assert finished.life.num_preemptions == second.num_preemptions
    assert finished.usage.wasted_tokens >= 14, "its prompt was computed twice"


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    harness = Harness(limits(num_blocks=11, enable_prefix_caching=False))
    for i in range(6):
        harness.add(harness.request(_prompt(9, start=5 + i), max_tokens=12))
    harness.run()
    harness.assert_all_served()
    preempting = [plan for plan in harness.plans if plan.preempted]
    assert preempting
    for plan in preempting:
        assert not plan.new_rows


@DEPTHS
def test_tokens_in_flight_of_a_preempted_request_are_dropped_and_drawn_again(depth: int) -> None:
    harness = Harness(limits(num_blocks=9, pipeline_depth=depth))
    for start in (2, 30, 60):
        harness.add(harness.request(_prompt(7, start=start), max_tokens=12))
    harness.run()
    assert harness.scheduler.load().preemptions > 0
    harness.assert_all_served()  # no gap, no token twice, the same as alone


def test_a_request_that_ends_early_wastes_only_what_was_in_flight() -> None:
    harness = Harness(limits(pipeline_depth=3, vocab_size=8))
    sampling = SamplingParams(max_tokens=100, seed=3)
    request = harness.add(harness.request([2, 3, 4], sampling=sampling))
    harness.run()
    harness.assert_all_served()
    finished = harness.seen[request.handle].finished
    assert finished is not None and finished.reason is FinishReason.STOP
    assert harness.tokens(request)[-1] == EOS
    assert 0 < finished.usage.wasted_tokens <= 2


def test_an_empty_step_carries_the_ended_rows_when_nothing_is_left_to_run() -> None:
    harness = Harness()
    request = harness.add(harness.request([2, 3], max_tokens=1))
    harness.step()
    assert harness.scheduler.has_work
    harness.step()
    assert harness.plans[-1].handles == [] and harness.plans[-1].finished == [request.handle]
    assert not harness.scheduler.has_work
    assert harness.plan() is None


def test_ended_rows_travel_with_the_next_step_of_the_others() -> None:
    harness = Harness()
    short = harness.add(harness.request([2, 3], max_tokens=1))
    harness.add(harness.request([4, 5], max_tokens=3))
    harness.step()
    harness.step()
    assert harness.plans[-1].finished == [short.handle] and harness.plans[-1].handles


def test_free_seq_is_the_newest_applied_step() -> None:
    harness = Harness(limits(pipeline_depth=2))
    harness.add(harness.request([2, 3], max_tokens=5))
    harness.plan()
    harness.plan()
    harness.receive()
    plan = harness.plan()
    assert plan is not None and (plan.step, plan.free_seq) == (3, 1)


def test_results_out_of_order_are_refused() -> None:
    harness = Harness(limits(pipeline_depth=2))
    harness.add(harness.request([2, 3], max_tokens=5))
    harness.plan()
    harness.plan()
    with pytest.raises(InvariantError, match="result of step 2, expected of step 1"):
        harness.scheduler.apply(StepOutcome(step=2), now=0.0)


def test_rows_may_come_back_in_any_order_and_unknown_ones_are_dropped() -> None:
    harness = Harness()
    first = harness.add(harness.request([2, 3], max_tokens=1))
    second = harness.add(harness.request([4, 5], max_tokens=1))
    plan = harness.plan()
    assert plan is not None
    update = harness.scheduler.apply(
        StepOutcome(
            step=1,
            handles=[77, second.handle, first.handle],
            num_sampled=[2, 1, 1],
            token_ids=[90, 91, 52, 51],
        ),
        now=0.0,
    )
    tokens = dict(zip(update.handles, update.token_ids, strict=True))
    assert tokens == {first.handle: 51, second.handle: 52}
    assert dict(zip(update.handles, update.source_starts, strict=True)) == {
        first.handle: 3,
        second.handle: 2,
    }


def test_a_live_row_without_its_token_ends_with_an_error_instead_of_waiting_for_ever() -> None:
    harness = Harness()
    request = harness.add(harness.request([2, 3]))
    harness.plan()
    update = harness.scheduler.apply(StepOutcome(step=1), now=0.0)
    assert [end.handle for end in update.finished] == [request.handle]
    assert update.finished[0].reason is FinishReason.ERROR


def test_a_prompt_that_fills_the_pool_alone_is_served() -> None:
    harness = Harness(limits(num_blocks=6, max_model_len=1000, pipeline_depth=2))
    request = harness.add(harness.request(_prompt(15), max_tokens=6))
    harness.run()
    harness.assert_all_served()
    assert harness.reason(request) is FinishReason.LENGTH
