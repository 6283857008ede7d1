"""When steps are sent and when they count as stalled."""

from __future__ import annotations

import pytest

from services.scheduler.step_clock import MIN_LEAD_S, STALL_AFTER_S, StepClock


def run(clock: StepClock, *, count: int, step_s: float, predicted_s: float) -> float:
    """Run steps back to back, one in flight at a time; returns the time after the last."""
    now = 0.0
    for _ in range(count):
        clock.sent(predicted_s, now=now)
        now += step_s
        clock.finished(step_s - 0.0002, now=now)
    return now


def test_the_next_step_is_due_a_lead_before_the_predicted_end() -> None:
    clock = StepClock()
    now = run(clock, count=100, step_s=0.1, predicted_s=0.1)
    clock.sent(0.1, now=now)
    assert now + 0.09 < clock.send_at() < now + 0.1 - MIN_LEAD_S + 0.001


def test_an_unknown_step_is_followed_at_once() -> None:
    clock = StepClock()
    clock.sent(0.0, now=5.0)
    assert clock.send_at() < 5.0


def test_predictions_that_are_off_make_the_next_step_come_earlier() -> None:
    steady, shaky = StepClock(), StepClock()
    run(steady, count=100, step_s=0.1, predicted_s=0.1)
    now = 0.0
    for i in range(100):
        shaky.sent(0.1, now=now)
        now += 0.06 if i % 2 else 0.14
        shaky.finished(0.1, now=now)
    steady.sent(0.1, now=0.0)
    shaky.sent(0.1, now=0.0)
    assert shaky.send_at() < steady.send_at() - 0.02


def test_a_prediction_that_is_wrong_by_a_factor_is_corrected() -> None:
    clock = StepClock()
    now = run(clock, count=200, step_s=0.2, predicted_s=0.1)
    clock.sent(0.1, now=now)
    assert clock.send_at() > now + 0.17


def test_slow_planning_makes_the_lead_longer() -> None:
    clock = StepClock()
    assert clock.lead_s == MIN_LEAD_S
    for _ in range(64):
        clock.planned(0.004)
    assert clock.lead_s == pytest.approx(0.012)


def test_a_step_stalls_after_ten_seconds_or_twenty_times_its_prediction() -> None:
    clock = StepClock()
    assert clock.stalls_at() is None
    clock.sent(0.01, now=100.0)
    assert clock.stalls_at() == 100.0 + STALL_AFTER_S
    clock.finished(0.01, now=100.01)
    slow = StepClock()
    slow.sent(2.0, now=100.0)
    assert slow.stalls_at() == pytest.approx(140.0)
    assert slow.age_s(103.0) == 3.0


def test_the_second_step_in_flight_begins_when_the_first_ends() -> None:
    clock = StepClock()
    clock.sent(0.1, now=0.0)
    clock.sent(0.1, now=0.09)
    assert clock.finished(0.1, now=0.1) == pytest.approx(0.1)
    assert clock.finished(0.1, now=0.2) == pytest.approx(0.1)
