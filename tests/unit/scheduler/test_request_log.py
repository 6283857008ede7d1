"""What is remembered of requests."""

from __future__ import annotations

import pytest

from services.common.errors import InvalidRequest
from services.scheduler.core.output import Finished, FinishReason, Life, Usage
from services.scheduler.core.request import Request
from services.scheduler.request_log import MAX_ENDED, RequestLog
from services.scheduler.submission import ChoiceSpec, Submission
from services.scheduler.ticket import Ticket
from tests.unit.scheduler.loopback import GREEDY, RecordingSink

END = Finished(
    handle=1,
    reason=FinishReason.STOP,
    usage=Usage(1, 0, 1, 1, 0),
    life=Life(0.0, None, None, None, 1.0, 0, 0),
)


def ticket(request_id: str, attempt: int = 0) -> Ticket:
    submission = Submission(
        request_id=request_id,
        attempt=attempt,
        model="",
        text_fp="",
        prompt_ids=(1,),
        sampling=GREEDY,
        choices=(ChoiceSpec(1, 0),),
    )
    request = Request(
        handle=0,
        request_id=request_id,
        prompt_ids=(1,),
        sampling=GREEDY,
        root_key=b"",
        arrival_s=0.0,
    )
    return Ticket(1, submission, request, RecordingSink())


def test_a_higher_attempt_names_the_tickets_it_supersedes() -> None:
    log = RequestLog()
    old = ticket("r")
    assert log.open_attempt("r", 0) == []
    log.enter(old)
    assert log.open_attempt("r", 1) == [old]


@pytest.mark.parametrize("attempt", [0, 2])
def test_an_attempt_that_is_not_higher_is_refused_also_after_the_end(attempt: int) -> None:
    log = RequestLog()
    log.open_attempt("r", 2)
    only = ticket("r", 2)
    log.enter(only)
    log.end(only, END)
    with pytest.raises(InvalidRequest, match="after attempt 2"):
        log.open_attempt("r", attempt)


def test_an_ended_request_can_be_explained() -> None:
    log = RequestLog()
    log.open_attempt("r", 0)
    only = ticket("r")
    log.enter(only)
    assert log.num_live == 1
    log.end(only, END)
    assert log.num_live == 0
    record = log.find("r")
    assert record is not None and record.ended == [(None, END)]


def test_a_ticket_that_never_entered_leaves_no_trace() -> None:
    log = RequestLog()
    log.end(ticket("r"), END)
    assert log.find("r") is None


def test_ended_requests_are_forgotten_oldest_first() -> None:
    log = RequestLog()
    for number in range(MAX_ENDED + 10):
        one = ticket(f"r{number}")
        log.open_attempt(f"r{number}", 0)
        log.enter(one)
        log.end(one, END)
    assert log.find("r9") is None
    assert log.find("r10") is not None
