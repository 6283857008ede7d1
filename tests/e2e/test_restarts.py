"""kill -9 of each child after everything was ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.system import DONE, System

LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}
BACK_TIMEOUT_S = 180.0
ON_THE_TOKEN_PATH = ("gateway", "tokenizer", "scheduler", "worker")


@pytest.fixture
def ready_system(system: System) -> Iterator[System]:
    """The shared system, all five children up before and after."""
    yield system
    until_back(system)


def until_back(system: System) -> None:
    system.until(
        lambda: len(system.pids()) == 5 and system.health() == 200,
        timeout_s=BACK_TIMEOUT_S,
        what="all five children up again",
    )


class LongStream:
    """A long stream that another thread reads to its end."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._has_begun = threading.Event()

    def read(self) -> str:
        """How it ended: "done", "error" (an error event) or "broken"."""
        try:
            return self._read()
        except httpx.TransportError:
            return "broken"

    def until_begun(self) -> None:
        """Wait for its first event: from then on its end can only be told inside of it."""
        assert self._has_begun.wait(timeout=60)

    def _read(self) -> str:
        with self._system.stream("Count.", **LONG) as events:
            for event in events:
                self._has_begun.set()
                if event is DONE:
                    return "done"
                if "error" in event:
                    return "error"
        return "no end"


@pytest.mark.parametrize("victim", ON_THE_TOKEN_PATH)
def test_a_killed_child_costs_the_requests_in_flight_and_is_started_again(
    ready_system: System, victim: str
) -> None:
    system = ready_system
    before = system.pids()
    with ThreadPoolExecutor(1) as pool:
        stream = LongStream(system)
        in_flight = pool.submit(stream.read)
        stream.until_begun()
        system.kill(victim)
        seconds = system.until(lambda: system.health() != 200, timeout_s=10, what="not healthy")
        assert seconds < 1.0
        expected = "broken" if victim == "gateway" else "error"
        assert in_flight.result(timeout=60) == expected
    if victim != "gateway":
        refused = system.chat()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["message"]
    until_back(system)
    after = system.pids()
    assert after.pop(victim) != before.pop(victim)
    assert after == before
    assert system.chat().status_code == 200


def test_a_killed_kvstore_delays_nothing(ready_system: System) -> None:
    system = ready_system
    before = system.pids()
    with ThreadPoolExecutor(1) as pool:
        stream = LongStream(system)
        in_flight = pool.submit(stream.read)
        stream.until_begun()
        system.kill("kvstore")
        began = time.monotonic()
        while time.monotonic() - began < 2.0:
            assert system.health() == 200
            assert system.chat().status_code == 200
        assert in_flight.result(timeout=120) == "done"
    until_back(system)
    after = system.pids()
    assert after.pop("kvstore") != before.pop("kvstore")
    assert after == before


def test_the_user_is_told_who_died_and_when_it_is_back(ready_system: System) -> None:
    system = ready_system
    pid = system.pids()["kvstore"]
    system.kill("kvstore")
    system.until(
        lambda: f"kvstore (pid {pid}) died: killed by SIGKILL" in system.output,
        timeout_s=10,
        what="the death is told",
    )
    until_back(system)
    new_pid = system.pids()["kvstore"]
    system.until(
        lambda: f"kvstore (pid {new_pid}) is back" in system.output,
        timeout_s=BACK_TIMEOUT_S,
        what="the return is told",
    )
