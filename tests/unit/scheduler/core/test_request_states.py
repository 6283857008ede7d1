"""The written states of a request: what may follow what, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvariantError
from services.common.sampling import SamplingParams
from services.scheduler.core.request import TRANSITIONS, Request, RequestStatus

_ALLOWED = {
    ("WAITING", "WAITING_FOR_PREPARE"),
    ("WAITING_FOR_PREPARE", "WAITING"),
    ("WAITING", "RUNNING"),
    ("RUNNING", "PREEMPTED"),
    ("PREEMPTED", "RUNNING"),
    ("WAITING", "FINISHED"),
    ("WAITING_FOR_PREPARE", "FINISHED"),
    ("RUNNING", "FINISHED"),
    ("PREEMPTED", "FINISHED"),
}


def _request() -> Request:
    return Request(
        handle=1,
        request_id="r",
        prompt_ids=[1],
        sampling=SamplingParams(),
        root_key=b"",
        arrival_s=0.0,
    )


def test_the_table_of_transitions_is_the_written_state_machine() -> None:
    table = {(a.name, b.name) for a, followers in TRANSITIONS.items() for b in followers}
    assert table == _ALLOWED


@settings(deadline=None)
@given(st.lists(st.sampled_from(list(RequestStatus)), max_size=20))
def test_a_request_only_ever_moves_along_the_table_and_never_leaves_its_end(
    wishes: list[RequestStatus],
) -> None:
    request = _request()
    for wish in wishes:
        before = request.status
        if (before.name, wish.name) in _ALLOWED:
            request.become(wish)
            assert request.status is wish
        else:
            with pytest.raises(InvariantError, match=f"from {before.name} to {wish.name}"):
                request.become(wish)
            assert request.status is before


def test_a_dropped_row_keeps_its_tokens_and_forgets_what_was_computed_and_in_flight() -> None:
    request = _request()
    request.append_token(5, now=1.0)
    request.num_planned_tokens, request.num_computed_tokens = 4, 3
    request.drop_row()
    assert request.token_ids == [1, 5]
    assert (request.num_planned_tokens, request.num_computed_tokens) == (2, 0)
    assert request.generation == 1
