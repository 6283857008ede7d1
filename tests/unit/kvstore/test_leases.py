"""How long an engine outlives its publisher's stream."""

from __future__ import annotations

from services.kvstore.leases import Leases


def test_an_engine_lives_while_its_stream_does() -> None:
    leases = Leases(lease_s=5)
    leases.hold(1, stream=0)
    assert leases.take_expired(now=1e9) == []
    assert leases.held() == [1]


def test_it_ends_lease_s_after_its_stream_and_is_named_once() -> None:
    leases = Leases(lease_s=5)
    leases.hold(1, stream=0)
    leases.end_stream(0, now=100)
    assert leases.held() == []
    assert leases.take_expired(now=104.9) == []
    assert leases.take_expired(now=105) == [1]
    assert leases.take_expired(now=106) == []


def test_a_publisher_that_comes_back_in_time_keeps_its_engines() -> None:
    leases = Leases(lease_s=5)
    leases.hold(1, stream=0)
    leases.end_stream(0, now=100)
    leases.hold(1, stream=1)
    assert leases.take_expired(now=200) == []


def test_the_end_of_an_older_stream_does_not_end_what_a_newer_one_holds() -> None:
    leases = Leases(lease_s=5)
    leases.hold(1, stream=0)
    leases.hold(1, stream=1)
    leases.end_stream(0, now=100)
    assert leases.take_expired(now=200) == []


def test_a_forgotten_engine_does_not_expire() -> None:
    leases = Leases(lease_s=5)
    leases.hold(1, stream=0)
    leases.hold(2, stream=0)
    leases.end_stream(0, now=100)
    leases.forget(1)
    assert leases.take_expired(now=200) == [2]
