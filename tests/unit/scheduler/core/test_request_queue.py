"""Order of the queue: examples, and hypothesis against a plain sort."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.errors import InvariantError
from services.common.sampling import SamplingParams
from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import (
    QueuePolicy,
    RequestQueue,
    fcfs,
    priority_with_aging,
)


def _request(
    handle: int, *, arrival_s: float = 0.0, priority: int = 0, policy: QueuePolicy = fcfs
) -> Request:
    request = Request(
        handle=handle,
        request_id=str(handle),
        prompt_ids=[1],
        sampling=SamplingParams(),
        root_key=b"",
        arrival_s=arrival_s,
        priority=priority,
    )
    request.rank = (policy(request), handle)
    return request


def _order(*requests: Request) -> list[int]:
    queue = RequestQueue()
    for request in requests:
        queue.add(request)
    return [request.handle for request in queue]


def test_fcfs_serves_in_order_of_arrival_and_ties_in_order_of_handles() -> None:
    assert _order(
        _request(1, arrival_s=2.0), _request(3, arrival_s=1.0), _request(2, arrival_s=1.0)
    ) == [2, 3, 1]


def test_lower_priority_goes_first_and_ties_by_arrival() -> None:
    policy = priority_with_aging(60.0)
    assert _order(
        _request(1, arrival_s=0.0, priority=1, policy=policy),
        _request(2, arrival_s=5.0, priority=0, policy=policy),
        _request(3, arrival_s=4.0, priority=0, policy=policy),
        _request(4, arrival_s=9.0, priority=-1, policy=policy),
    ) == [4, 3, 2, 1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(-3, 3)), min_size=1, max_size=30))
def test_no_newcomer_passes_a_request_that_has_waited_long_enough(
    others: list[tuple[float, int]],
) -> None:
    policy = priority_with_aging(60.0)
    patient = _request(1, arrival_s=0.0, priority=5, policy=policy)
    for handle, (arrival_s, priority) in enumerate(others, start=2):
        other = _request(handle, arrival_s=arrival_s, priority=priority, policy=policy)
        if arrival_s > (5 - priority) * 60.0:
            assert patient.rank < other.rank


def test_a_preempted_request_goes_in_front_of_those_that_came_later() -> None:
    queue = RequestQueue()
    first, second, third = (_request(i, arrival_s=i) for i in (1, 2, 3))
    for request in (second, third, first):
        queue.add(request)
    assert queue.requests[0] is first


def test_taking_out_a_request_that_is_not_there_is_refused() -> None:
    queue = RequestQueue()
    queue.add(_request(1))
    with pytest.raises(InvariantError, match="request 2 is not in this queue"):
        queue.remove(_request(2))


class QueueMachine(RuleBasedStateMachine):
    """Add, remove and ask for positions, against a list that is sorted each time."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.model: list[Request] = []
        self.last_handle = 0

    @rule(arrival_s=st.integers(0, 5), priority=st.integers(-2, 2), uncached=st.integers(1, 50))
    def add(self, arrival_s: int, priority: int, uncached: int) -> None:
        self.last_handle += 1
        policy = priority_with_aging(2.0)
        request = _request(self.last_handle, arrival_s=arrival_s, priority=priority, policy=policy)
        request.num_uncached_tokens = uncached
        self.queue.add(request)
        self.model.append(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.model) - 1))
        self.queue.remove(self.model.pop(index))

    @invariant()
    def is_sorted_and_complete(self) -> None:
        expected = sorted(self.model, key=lambda request: request.rank)
        assert list(self.queue) == expected
        assert [self.queue.position(r) for r in expected] == list(range(len(expected)))
        assert self.queue.num_uncached_tokens == sum(r.num_uncached_tokens for r in expected)


QueueMachine.TestCase.settings = settings(max_examples=50, deadline=None)
TestQueue = QueueMachine.TestCase
