"""Sharing of blocks: prefix hits, choices of one request, and what a failure does to both."""

from __future__ import annotations

import pytest

from services.common.block_hash import root_key
from services.common.errors import RequestFailed
from services.common.sampling import SamplingParams
from services.scheduler.core.output import AbortReason, FinishReason, StepOutcome
from services.scheduler.core.request import Request
from tests.unit.scheduler.core.harness import Harness, limits

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def _prompt(length: int, *, start: int = 2) -> list[int]:
    return [start + i % 90 for i in range(length)]


def _cached(harness: Harness, request: Request) -> int:
    finished = harness.seen[request.handle].finished
    assert finished is not None
    return finished.usage.cached_tokens


# ---- prefix hits


def test_two_equal_prompts_in_one_step_share_their_full_blocks() -> None:
    harness = Harness()
    first = harness.add(harness.request(_prompt(10)))
    second = harness.add(harness.request(_prompt(10), seed=1))
    harness.step()
    assert harness.plans[0].num_tokens == [10, 2]
    assert first.block_ids[:2] == second.block_ids[:2]
    harness.run()
    harness.assert_all_served()
    assert _cached(harness, second) == 8


@DEPTHS
def test_the_next_turn_of_a_chat_hits_the_blocks_of_the_output(depth: int) -> None:
    harness = Harness(limits(pipeline_depth=depth))
    first = harness.add(harness.request(_prompt(6), max_tokens=11))
    harness.run()
    turn = harness.add(harness.request([*_prompt(6), *harness.tokens(first), 50, 51]))
    harness.run()
    harness.assert_all_served()
    assert _cached(harness, turn) == 16


def test_hits_are_counted_in_tokens_and_only_for_admitted_requests() -> None:
    harness = Harness(limits(num_blocks=6))
    harness.add(harness.request(_prompt(9), max_tokens=8))
    harness.step()
    harness.add(harness.request(_prompt(17), max_tokens=1))
    for _ in range(3):
        harness.step()  # it does not fit yet, and is looked up each time
    load = harness.scheduler.load()
    assert (load.prefix_queries, load.prefix_hits) == (9, 0)
    harness.run()
    load = harness.scheduler.load()
    assert (load.prefix_queries, load.prefix_hits) == (26, 8)


def test_namespaces_do_not_share() -> None:
    harness = Harness()
    harness.add(harness.request(_prompt(9)))
    harness.run()
    other = root_key("test weights", cache_namespace="tenant")
    stranger = harness.add(harness.request(_prompt(9), root_key=other))
    harness.run()
    assert _cached(harness, stranger) == 0


def test_without_prefix_caching_nothing_hits_and_nothing_is_published() -> None:
    harness = Harness(limits(enable_prefix_caching=False))
    for _ in range(2):
        harness.add(harness.request(_prompt(9)))
        harness.run()
    assert harness.scheduler.load().prefix_hits == 0
    assert not harness.scheduler.take_kv_events()


@DEPTHS
def test_prompt_logprobs_are_computed_in_full_and_given_out_once_and_complete(depth: int) -> None:
    harness = Harness(limits(max_num_batched_tokens=8, pipeline_depth=depth))
    harness.add(harness.request(_prompt(20)))
    harness.run()
    sampling = SamplingParams(prompt_logprobs=1, max_tokens=3, ignore_eos=True)
    request = harness.add(harness.request(_prompt(20), sampling=sampling))
    chunks = []
    while harness.reason(request) is None:
        while harness.plan() is not None:
            pass
        plan = harness.in_flight.popleft()
        outcome = harness.device.run(plan)
        outcome = StepOutcome(
            step=outcome.step,
            handles=outcome.handles,
            num_sampled=outcome.num_sampled,
            token_ids=outcome.token_ids,
            prompt_logprobs={request.handle: f"chunk {plan.step}"}
            if plan.num_tokens[0] > 1
            else {},
        )
        update = harness.scheduler.apply(outcome, now=harness.now)
        harness._take(update)
        chunks += update.prompt_logprobs
    assert _cached(harness, request) == 0
    assert len(chunks) == 3 and {handle for handle, _ in chunks} == {request.handle}


def test_kv_events_tell_of_blocks_once_their_step_is_applied_and_of_their_eviction() -> None:
    harness = Harness(limits(num_blocks=5))
    first = harness.add(harness.request(_prompt(9), max_tokens=1))
    harness.plan()
    assert not harness.scheduler.take_kv_events(), "tentative"
    harness.receive()
    events = harness.scheduler.take_kv_events()
    assert events.stored == first.block_keys[:2] and not events.removed
    assert harness.scheduler.published_keys() == b"".join(events.stored)
    harness.add(harness.request(_prompt(16, start=60), max_tokens=1))
    harness.run()
    assert set(harness.scheduler.take_kv_events().removed) == set(events.stored)


def test_the_cache_is_reset_only_while_no_request_holds_blocks() -> None:
    harness = Harness()
    harness.add(harness.request(_prompt(9)))
    harness.step()
    assert not harness.scheduler.reset_prefix_cache()
    harness.run()
    harness.scheduler.take_kv_events()
    assert harness.scheduler.reset_prefix_cache()
    assert harness.scheduler.take_kv_events().cleared
    again = harness.add(harness.request(_prompt(9)))
    harness.run()
    assert _cached(harness, again) == 0


def test_asking_what_is_cached_changes_nothing() -> None:
    harness = Harness()
    harness.add(harness.request(_prompt(9)))
    harness.run()
    assert harness.scheduler.num_cached_tokens(harness.request(_prompt(9))) == 8
    harness.check()
    assert harness.scheduler.load().prefix_hits == 0


# ---- choices of one request


def _choices(harness: Harness, count: int, **fields: object) -> list[Request]:
    return [harness.request(_prompt(10), choice=i, **fields) for i in range(count)]  # type: ignore[arg-type]


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
def test_choices_wait_for_the_first_to_compute_the_prompt_and_fork_its_full_blocks(
    depth: int, caching: bool
) -> None:
    harness = Harness(
        limits(pipeline_depth=depth, enable_prefix_caching=caching, max_num_batched_tokens=8)
    )
    choices = _choices(harness, 3)
    harness.add(*choices)
    harness.plan()
    assert harness.plans[0].handles == [choices[0].handle], "the prompt is computed once"
    harness.run()
    harness.assert_all_served()
    outputs = [tuple(harness.tokens(choice)) for choice in choices]
    assert len(set(outputs)) == 3, "every choice draws its own"
    assert [_cached(harness, choice) for choice in choices] == [0, 8, 8]
    assert harness.device.num_tokens_run == 10 + 2 * 2 + 3 * 3


def test_the_prompts_logprobs_are_asked_of_the_first_choice_only() -> None:
    harness = Harness(limits(max_num_batched_tokens=8))
    sampling = SamplingParams(prompt_logprobs=1, max_tokens=2, ignore_eos=True)
    prompt = _prompt(10)
    choices = [harness.request(prompt, choice=i, sampling=sampling) for i in range(3)]
    harness.add(*choices)
    harness.run()
    harness.assert_all_served()
    rows = [row for plan in harness.plans for row in plan.new_rows]
    assert [row.prompt_logprobs_done for row in rows] == [False, True, True]


def test_choices_are_served_when_the_first_ends_with_its_first_token() -> None:
    harness = Harness(limits(enable_prefix_caching=False))
    choices = _choices(harness, 3, max_tokens=1)
    harness.add(*choices)
    harness.run()
    harness.assert_all_served()
    assert harness.device.num_tokens_run == 10 + 2 * 2


def test_if_the_first_choice_ends_before_the_prompt_is_computed_the_next_computes_it() -> None:
    harness = Harness(limits(max_num_batched_tokens=8))
    choices = _choices(harness, 3)
    harness.add(*choices)
    harness.plan()
    for choice in choices[:2]:
        harness.scheduler.abort(
            choice.handle, reason=AbortReason.CLIENT_GONE, kept_tokens=None, now=0.0
        )
        harness.take_finished()
        harness.check()
    harness.run()
    harness.assert_all_served()
    assert harness.reason(choices[2]) is FinishReason.LENGTH


def test_blocks_that_only_waiting_choices_hold_are_given_up_when_the_pool_is_short() -> None:
    harness = Harness(limits(num_blocks=7, max_num_seqs=1, enable_prefix_caching=False))
    prompt_ids = _prompt(13)
    harness.now = 5.0
    choices = [harness.request(prompt_ids, choice=i, max_tokens=1) for i in range(2)]
    harness.add(*choices)
    harness.plan()
    early = harness.request(_prompt(22, start=40), arrival_s=1.0, max_tokens=1)
    harness.add(early)  # came first, needs all blocks
    harness.run()
    harness.assert_all_served()
    assert _cached(harness, choices[1]) == 0


# ---- failures


def _share(harness: Harness) -> tuple[Request, Request, Request]:
    """A writer, one who hits its blocks in the same step, and a stranger."""
    writer = harness.add(harness.request(_prompt(9)))
    reader = harness.add(harness.request(_prompt(9), seed=1))
    stranger = harness.add(harness.request(_prompt(9, start=50)))
    return writer, reader, stranger


@DEPTHS
@pytest.mark.parametrize("budget", [64, 4])
def test_a_row_that_goes_wrong_ends_alone_and_whoever_hit_its_blocks_computes_again(
    depth: int, budget: int
) -> None:
    harness = Harness(limits(pipeline_depth=depth, max_num_batched_tokens=budget, max_num_seqs=3))
    writer, reader, stranger = _share(harness)
    harness.device.bad_handles.add(writer.handle)
    harness.run()
    harness.assert_all_served()  # the reader's tokens are those of a clean run
    assert harness.reason(writer) is FinishReason.ERROR
    finished = harness.seen[writer.handle].finished
    assert finished is not None and isinstance(finished.error, RequestFailed)
    assert reader.num_preemptions >= 1
    assert harness.reason(reader) is harness.reason(stranger) is FinishReason.LENGTH


def test_bad_blocks_are_neither_published_nor_hit_later() -> None:
    harness = Harness()
    writer = harness.add(harness.request(_prompt(9)))
    harness.device.bad_handles.add(writer.handle)
    harness.run()
    assert harness.scheduler.take_kv_events().stored == []
    later = harness.add(harness.request(_prompt(9)))
    harness.run()
    harness.assert_all_served()
    assert _cached(harness, later) == 0


def test_bad_blocks_are_forgotten_with_what_a_finished_request_built_on_them() -> None:
    harness = Harness(limits(max_num_batched_tokens=8, max_num_seqs=2))
    bad = harness.add(harness.request(_prompt(20)))
    harness.device.bad_handles.add(bad.handle)
    harness.step()
    # Another hits the first two blocks, computes a third from them, and leaves in mid prefill.
    heir = harness.add(harness.request([*_prompt(8), 77, 77, 77, 77, 78], max_tokens=1))
    harness.step()
    harness.scheduler.abort(heir.handle, reason=AbortReason.CLIENT_GONE, kept_tokens=None, now=0.0)
    harness.take_finished()
    harness.run()
    again = harness.add(harness.request([*_prompt(8), 77, 77, 77, 77, 78], max_tokens=1))
    harness.run()
    harness.assert_all_served()
    assert _cached(harness, again) == 0


def test_a_row_error_of_a_request_that_was_aborted_meanwhile_still_drops_its_blocks() -> None:
    harness = Harness()
    writer, reader, _ = _share(harness)
    harness.device.bad_handles.add(writer.handle)
    harness.plan()
    harness.scheduler.abort(
        writer.handle, reason=AbortReason.CLIENT_GONE, kept_tokens=None, now=0.0
    )
    harness.take_finished()
    harness.run()
    harness.assert_all_served()
    assert harness.reason(reader) is FinishReason.LENGTH and reader.num_preemptions == 1


@DEPTHS
def test_a_failed_step_is_run_again_in_halves_until_the_guilty_row_is_alone(depth: int) -> None:
    harness = Harness(limits(pipeline_depth=depth))
    requests = [
        harness.add(harness.request(_prompt(9, start=2 + 10 * i), max_tokens=6)) for i in range(8)
    ]
    harness.step()
    guilty = requests[5]
    harness.device.fatal_handles.add(guilty.handle)
    harness.run()
    harness.assert_all_served()
    for request in requests:
        is_guilty = request is guilty
        assert harness.reason(request) is (FinishReason.ERROR if is_guilty else FinishReason.LENGTH)
    error = harness.seen[guilty.handle].finished
    assert error is not None and "boom" in str(error.error)
    assert harness.device.num_failed_steps <= 4 + depth - 1, "8, 4, 2, 1, and steps in flight"


@pytest.mark.parametrize("depth", [2, 3])
def test_a_step_that_fails_after_its_rows_were_given_up_does_not_start_the_others_over(
    depth: int,
) -> None:
    harness = Harness(limits(pipeline_depth=depth))
    first = harness.add(harness.request(_prompt(9), max_tokens=6))
    harness.plan()
    second, third = (
        harness.add(harness.request(_prompt(9, start=20 * i), max_tokens=6)) for i in (1, 2)
    )
    harness.device.fatal_handles |= {first.handle, second.handle}
    harness.plan()
    harness.receive()  # the first is alone in it
    assert harness.reason(first) is FinishReason.ERROR
    harness.run(max_steps=40)
    harness.assert_all_served()
    assert harness.reason(second) is FinishReason.ERROR
    assert harness.reason(third) is FinishReason.LENGTH


def test_two_guilty_rows_are_both_found() -> None:
    harness = Harness()
    requests = [harness.add(harness.request(_prompt(9, start=2 + 9 * i))) for i in range(7)]
    harness.device.fatal_handles |= {requests[1].handle, requests[6].handle}
    harness.run()
    harness.assert_all_served()
    failed = [r for r in requests if harness.reason(r) is FinishReason.ERROR]
    assert failed == [requests[1], requests[6]]


def test_a_failed_step_publishes_nothing_and_its_blocks_are_not_hit() -> None:
    harness = Harness()
    guilty = harness.add(harness.request(_prompt(9)))
    harness.device.fatal_handles.add(guilty.handle)
    harness.run()
    assert harness.reason(guilty) is FinishReason.ERROR
    assert not harness.scheduler.take_kv_events()
    later = harness.add(harness.request(_prompt(9)))
    harness.run()
    harness.assert_all_served()
    assert _cached(harness, later) == 0


def test_choices_that_forked_a_failed_prompt_are_served_from_a_new_one() -> None:
    harness = Harness()
    choices = _choices(harness, 3)
    harness.device.bad_handles.add(choices[0].handle)
    harness.add(*choices)
    harness.run()
    harness.assert_all_served()
    assert [harness.reason(choice) for choice in choices] == [
        FinishReason.ERROR,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]


def test_while_a_guilty_row_is_sought_newcomers_wait_and_are_served_after() -> None:
    harness = Harness()
    requests = [harness.add(harness.request(_prompt(9, start=2 + 9 * i))) for i in range(4)]
    harness.device.fatal_handles.add(requests[3].handle)
    harness.step()
    newcomer = harness.add(harness.request(_prompt(5, start=60)))
    harness.step()
    assert newcomer.handle not in harness.plans[-1].handles
    harness.run()
    harness.assert_all_served()


@pytest.mark.parametrize(("pools", "num_lives"), [(True, 2), (False, 3)])
def test_an_error_of_an_earlier_life_throws_out_a_later_one_only_if_that_builds_on_it(
    pools: bool, num_lives: int
) -> None:
    harness = Harness(limits(pipeline_depth=2))
    request = harness.add(harness.request(_prompt(9), pools=pools))
    harness.device.bad_handles.add(request.handle)
    harness.plan()
    harness.scheduler._table.preempt(request)
    harness.run(max_steps=10)
    assert harness.reason(request) is FinishReason.ERROR
    assert request.num_preemptions == num_lives - 1
    harness.assert_all_served()


def test_an_error_drops_what_earlier_lives_have_written_too() -> None:
    harness = Harness(limits(max_num_batched_tokens=8))
    request = harness.add(harness.request(_prompt(20)))
    harness.device.bad_handles.add(request.handle)
    harness.step()  # two bad blocks, and nothing shows yet
    harness.scheduler._table.preempt(request)
    harness.run()
    assert harness.reason(request) is FinishReason.ERROR
    later = harness.add(harness.request(_prompt(20)))
    harness.run()
    harness.assert_all_served()
    assert _cached(harness, later) == 0


def test_a_step_that_fails_after_its_rows_began_anew_puts_them_under_suspicion() -> None:
    harness = Harness(limits(pipeline_depth=2))
    request = harness.add(harness.request(_prompt(9)))
    harness.device.fatal_handles.add(request.handle)
    harness.plan()
    harness.scheduler._table.preempt(request)
    harness.run(max_steps=10)
    assert harness.reason(request) is FinishReason.ERROR
    harness.assert_all_served()
