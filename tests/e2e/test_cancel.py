"""Closing the HTTP connection ends a request everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.system import System

LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def idle_system(system: System) -> Iterator[System]:
    """The shared system without a request."""
    until_idle(system, timeout_s=60)
    yield system
    until_idle(system, timeout_s=60)


def until_idle(system: System, *, timeout_s: float) -> float:
    return system.until(
        lambda: system.stats().num_requests == 0 and system.num_blocks_used() == 0,
        timeout_s=timeout_s,
        what="no request and no block in use",
    )


def test_closing_a_stream_in_decode_frees_its_blocks_within_a_second(idle_system: System) -> None:
    system = idle_system
    with system.stream("Count.", **LONG) as events:
        while not next(events)["choices"][0]["delta"].get("content"):
            pass
        assert system.num_blocks_used() > 0
    assert until_idle(system, timeout_s=10) < 1.0


def test_closing_a_request_that_is_not_streamed_frees_its_blocks_within_a_second(
    idle_system: System,
) -> None:
    system = idle_system
    with ThreadPoolExecutor(1) as pool, httpx.Client(trust_env=False) as client:
        body = {"messages": [{"role": "user", "content": "Count."}], **LONG}
        pool.submit(_post_and_give_up, client, f"{system.url}/v1/chat/completions", body)
        system.until(lambda: system.num_blocks_used() > 0, timeout_s=30, what="blocks in use")
        client.close()
    assert until_idle(system, timeout_s=10) < 1.5


def _post_and_give_up(client: httpx.Client, url: str, body: dict[str, Any]) -> None:
    client.post(url, json=body, timeout=httpx.Timeout(60.0, read=0.5))
