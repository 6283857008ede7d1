"""ETAs and Retry-After follow the rate at which requests are admitted."""

from __future__ import annotations

import pytest

from services.scheduler.core.drain_rate import DrainRate


def _drained(per_second: int, *, seconds: int) -> DrainRate:
    rate = DrainRate()
    for i in range(per_second * seconds):
        rate.note_admission(now=i / per_second)
    return rate


@pytest.mark.parametrize("seconds", [3, 20, 200])
def test_a_steady_rate_is_measured_whether_the_queue_is_young_or_old(seconds: int) -> None:
    rate = _drained(10, seconds=seconds)
    assert rate.per_second(now=float(seconds)) == pytest.approx(10.0, rel=0.1)


def test_the_eta_is_the_requests_ahead_over_the_rate() -> None:
    rate = _drained(10, seconds=60)
    assert rate.eta_s(50, now=60.0) == pytest.approx(5.0, rel=0.1)


def test_retry_after_is_longer_for_a_slower_queue_and_never_below_a_second() -> None:
    fast, slow = _drained(100, seconds=60), _drained(2, seconds=60)
    assert fast.retry_after_s(64, now=60.0) == 1.0
    assert slow.retry_after_s(64, now=60.0) == pytest.approx(32.0, rel=0.1)
    assert slow.retry_after_s(10_000, now=60.0) == 60.0


def test_a_rate_that_stops_is_forgotten() -> None:
    rate = _drained(10, seconds=60)
    assert rate.per_second(now=120.0) < 1.0


def test_before_the_first_admission_there_is_no_eta() -> None:
    assert DrainRate().eta_s(5, now=1.0) is None
    assert DrainRate().retry_after_s(5, now=1.0) == 1.0
