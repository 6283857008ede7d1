"""Requests that pool: a prompt is computed, a vector ends it, nothing is sampled."""

from __future__ import annotations

import pytest

from services.common.errors import ContextLengthExceeded, RequestFailed
from services.scheduler.core.output import AbortReason, FinishReason
from services.scheduler.core.request import Request
from tests.unit.scheduler.core.harness import Harness, limits


def vector_of(harness: Harness, request: Request) -> bytes:
    finished = harness.seen[request.handle].finished
    assert finished is not None and finished.reason is FinishReason.STOP
    return finished.pooled


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_ends_with_its_vector_when_the_prompt_is_computed(depth: int) -> None:
    harness = Harness(limits(max_num_batched_tokens=8, pipeline_depth=depth))
    request = harness.add(harness.request(range(2, 22), pools=True))
    harness.run()
    assert vector_of(harness, request) == harness.expected_vector(request)
    assert harness.tokens(request) == []
    assert [plan.total_num_tokens for plan in harness.plans if plan.handles] == [8, 8, 4]
    finished = harness.seen[request.handle].finished
    assert finished is not None
    usage = finished.usage
    assert (usage.computed_tokens, usage.output_tokens, usage.wasted_tokens) == (20, 0, 0)
    harness.assert_all_served()


def test_it_fills_the_prefix_cache_and_does_not_read_it() -> None:
    harness = Harness()
    prompt_ids = list(range(2, 22))
    first = harness.add(harness.request(prompt_ids, pools=True))
    harness.run()
    second = harness.add(harness.request(prompt_ids, pools=True))
    harness.run()
    assert vector_of(harness, first) == vector_of(harness, second)
    assert harness.device.num_tokens_run == 40
    harness.add(harness.request(prompt_ids, max_tokens=1))
    harness.run()
    assert harness.device.num_tokens_run == 44
    assert harness.scheduler.load().prefix_hits == 16


def test_it_starts_over_when_it_is_preempted() -> None:
    harness = Harness(limits(num_blocks=9, max_num_batched_tokens=8, block_size=4))
    # It grows to five blocks while the prompt, of five, is computed beside it.
    grower = harness.add(harness.request(range(2, 13), max_tokens=9))
    request = harness.add(harness.request(range(30, 50), pools=True))
    harness.run()
    finished = harness.seen[request.handle].finished
    assert finished is not None and finished.life.num_preemptions == 1
    assert vector_of(harness, request) == harness.expected_vector(request)
    assert harness.tokens(grower) == harness.expected(grower.handle)


def test_it_moves_to_another_engine_and_is_made_there_from_the_start() -> None:
    lost, other = (Harness(limits(max_num_batched_tokens=8)) for _ in range(2))
    request = lost.add(lost.request(range(2, 22), pools=True))
    lost.step()
    (moved,) = lost.scheduler.lose_engine()
    assert moved is request and request.crashes == 0
    other.add(request)
    other.run()
    assert vector_of(other, request) == other.expected_vector(request)


def test_an_abort_frees_it_half_way() -> None:
    harness = Harness(limits(max_num_batched_tokens=8))
    request = harness.add(harness.request(range(2, 22), pools=True))
    harness.step()
    harness.scheduler.abort(
        request.handle, reason=AbortReason.CLIENT_GONE, kept_tokens=None, now=harness.now
    )
    harness.run()
    assert harness.reason(request) is FinishReason.ABORT
    harness.assert_all_served()


def test_a_worker_that_returns_no_vector_is_told_of_as_an_error() -> None:
    harness = Harness()
    request = harness.add(harness.request([2, 3], pools=True))
    harness.device.knows_pooling = False
    harness.run()
    finished = harness.seen[request.handle].finished
    assert finished is not None and isinstance(finished.error, RequestFailed)
    assert "no vector" in finished.error.message


def test_a_prompt_may_fill_the_context_or_the_pool_and_no_more() -> None:
    harness = Harness(limits(max_model_len=40))
    request = harness.add(harness.request([2] * 40, pools=True))
    harness.run()
    assert vector_of(harness, request)
    with pytest.raises(ContextLengthExceeded, match="40 tokens"):
        harness.add(harness.request([2] * 41, pools=True))
    harness = Harness(limits(num_blocks=6))
    request = harness.add(harness.request([2] * 20, pools=True))
    harness.run()
    assert vector_of(harness, request)
    with pytest.raises(ContextLengthExceeded, match="KV cache holds 20 tokens"):
        harness.add(harness.request([2] * 21, pools=True))
