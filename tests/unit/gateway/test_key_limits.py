"""What one API key may use: requests at one time, and tokens per minute."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from services.common.errors import ConfigError, Overloaded
from services.gateway.config import GatewayConfig
from services.gateway.key_limits import KeyLimits
from services.gateway.server import GatewayServer


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """A clock of the test's own."""
    return Clock()


def refusal(limits: KeyLimits, tenant: str = "a") -> Overloaded | None:
    """Why a request of a key may not enter; it leaves at once if it may."""
    try:
        with limits.slot(tenant):
            return None
    except Overloaded as error:
        return error


def test_without_limits_a_key_may_use_anything(clock: Clock) -> None:
    limits = KeyLimits(max_in_flight=None, max_tokens_per_minute=None, clock=clock)
    with ExitStack() as inside:
        for _ in range(100):
            inside.enter_context(limits.slot("a"))
            limits.charge("a", 10**9)
        assert refusal(limits) is None


def test_requests_at_one_time_are_counted_per_key_and_given_back(clock: Clock) -> None:
    limits = KeyLimits(max_in_flight=2, max_tokens_per_minute=None, clock=clock)
    with limits.slot("a"):
        with limits.slot("a"):
            error = refusal(limits)
            assert error is not None and error.http_status == 429
            assert error.code == "rate_limit_exceeded"
            assert error.retry_after_s == 1.0
            assert refusal(limits, "b") is None
        assert refusal(limits) is None


def test_a_request_that_fails_gives_its_place_back(clock: Clock) -> None:
    limits = KeyLimits(max_in_flight=1, max_tokens_per_minute=None, clock=clock)
    with pytest.raises(ValueError, match="broken"), limits.slot("a"):
        raise ValueError("broken")
    assert refusal(limits) is None


def test_used_up_tokens_come_back_evenly_over_a_minute(clock: Clock) -> None:
    limits = KeyLimits(max_in_flight=None, max_tokens_per_minute=600, clock=clock)
    limits.charge("a", 599)
    assert refusal(limits) is None
    limits.charge("a", 21)  # 20 are owed, and 10 come back each second
    error = refusal(limits)
    assert error is not None and error.retry_after_s == pytest.approx(2.0)
    assert "600 tokens per minute" in error.message
    assert refusal(limits, "b") is None
    clock.now_s += 1.5
    error = refusal(limits)
    assert error is not None and error.retry_after_s == pytest.approx(0.5)
    clock.now_s += 1.0
    assert refusal(limits) is None


def test_a_key_that_rests_saves_up_one_minute_and_no_more(clock: Clock) -> None:
    limits = KeyLimits(max_in_flight=None, max_tokens_per_minute=60, clock=clock)
    assert refusal(limits) is None
    clock.now_s += 3600
    assert refusal(limits) is None
    limits.charge("a", 60)
    assert refusal(limits) is not None


def test_in_the_long_run_a_key_gets_its_tokens_per_minute_and_no_more(clock: Clock) -> None:
    limits = KeyLimits(max_in_flight=None, max_tokens_per_minute=600, clock=clock)
    used = 0
    for _ in range(3600):
        if refusal(limits) is None:
            limits.charge("a", 90)
            used += 90
        clock.now_s += 1
    assert 60 * 600 <= used <= 61 * 600 + 90


@pytest.mark.parametrize(
    "limit", [{"max_in_flight_per_key": 1}, {"max_tokens_per_minute_per_key": 1}]
)
def test_limits_per_key_without_keys_are_a_config_error(limit: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        GatewayServer(GatewayConfig(**limit))
