"""When a dead child lives again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.restart import Deaths, RestartPolicy


def test_delays_double_and_the_sixth_death_in_ten_minutes_is_the_last() -> None:
    deaths = Deaths(RestartPolicy())
    delays = [deaths.record(now) for now in (0.0, 10.0, 20.0, 30.0, 40.0, 50.0)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_deaths_older_than_ten_minutes_are_forgotten() -> None:
    deaths = Deaths(RestartPolicy())
    for now in (0.0, 1.0, 2.0, 3.0, 4.0):
        deaths.record(now)
    assert deaths.record(604.5) == 1.0
    assert deaths.num_recent == 1


@given(st.lists(st.floats(0.0, 500.0), min_size=1, max_size=40))
def test_a_child_is_given_up_only_after_six_deaths_within_ten_minutes(gaps: list[float]) -> None:
    deaths = Deaths(RestartPolicy())
    times: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap
        times = [t for t in times if now - t < 600.0] + [now]
        delay = deaths.record(now)
        if len(times) >= 6:
            assert delay is None
            return
        assert delay == pytest.approx(2.0 ** (len(times) - 1))
