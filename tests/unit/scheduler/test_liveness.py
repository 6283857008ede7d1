"""When silence means death."""

from __future__ import annotations

from services.scheduler.liveness import DEAD_AFTER_S, HEARTBEAT_S, Judge, Pulse


def test_a_peer_is_dead_after_five_seconds_of_silence() -> None:
    pulse = Pulse(now=0.0)
    pulse.beat(10.0)
    assert not pulse.is_dead(10.0 + DEAD_AFTER_S)
    assert pulse.is_dead(10.1 + DEAD_AFTER_S)
    pulse.beat(16.0)
    assert not pulse.is_dead(16.1)


def test_a_process_whose_own_loop_was_late_reads_before_it_judges() -> None:
    judge = Judge(period_s=0.1, now=0.0)
    assert judge.may_judge(0.1)
    assert judge.may_judge(1.0), "a little late is not late"
    assert not judge.may_judge(7.0)
    assert not judge.may_judge(7.1)
    assert judge.may_judge(7.0 + HEARTBEAT_S)
