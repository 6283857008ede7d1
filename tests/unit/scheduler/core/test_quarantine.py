"""Halving: whoever is guilty is found, whatever the others do meanwhile."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling import SamplingParams
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.request import Request


def _requests(count: int) -> list[Request]:
    return [
        Request(
            handle=handle,
            request_id=str(handle),
            prompt_ids=[1],
            sampling=SamplingParams(),
            root_key=b"",
            arrival_s=0.0,
        )
        for handle in range(1, count + 1)
    ]


@settings(deadline=None)
@given(data=st.data(), count=st.integers(1, 12))
def test_exactly_the_guilty_are_found_and_the_rest_is_let_go(
    data: st.DataObject, count: int
) -> None:
    requests = _requests(count)
    handles = data.draw(st.sets(st.integers(1, count), min_size=1))
    guilty = {request for request in requests if request.handle in handles}
    quarantine = Quarantine()
    found: set[Request] = set()
    batch = requests
    while batch:
        if guilty & set(batch):
            culprit = quarantine.note_failed(batch)
            if culprit is not None:
                found.add(culprit)
        else:
            for request in batch:
                quarantine.discard(request)
        # Only some of a group may fit into a step.
        admitted = [r for r in requests if quarantine.is_active and quarantine.admits(r)]
        batch = admitted[: data.draw(st.integers(1, max(1, len(admitted))))]
    assert found == guilty
    assert not quarantine.is_active


def test_a_suspect_that_ends_meanwhile_is_sought_no_more() -> None:
    requests = _requests(3)
    quarantine = Quarantine()
    assert quarantine.note_failed(requests) is None
    for request in requests:
        quarantine.discard(request)
    assert not quarantine.is_active and quarantine.admits(requests[0])
