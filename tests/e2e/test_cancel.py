"""Closing the HTTP connection ends a request everywhere: in the queue, in prefill, in decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import TINY_FLAGS, System

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 3000,
    "ignore_eos": True,
    "temperature": 0,
}
NARROW_FLAGS = ("--max-num-seqs", "1", "--max-num-batched-tokens", "4")
PROMPT_TOKENS = 4_000
STREAMED_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def narrow_system(
    tiny_chat_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """A system of one place, so that the next request waits, and of a slow prefill."""
    log_file = tmp_path_factory.mktemp("serve") / "narrow.txt"
    with System(tiny_chat_dir, *TINY_FLAGS, *NARROW_FLAGS, log_file=log_file) as system:
        yield system.until_ready()


def until_idle(system: System, *, timeout_s: float = 30.0) -> float:
    """Wait until nothing is asked for and no block is in use; returns the seconds that it took."""

    def is_idle() -> bool:
        stats = system.stats()
        return stats.num_requests == 0 and all(e.load.kv_blocks_used == 0 for e in stats.engines)

    return system.until(is_idle, timeout_s=timeout_s, what="no request and no block in use")


@STREAMED_OR_NOT
def test_a_close_in_decode_frees_the_blocks_within_a_second(system: System, stream: bool) -> None:
    until_idle(system, timeout_s=60)
    before = system.load().generated_tokens
    with system.sent(CHAT, **LONG, stream=stream):
        system.until(
            lambda: system.load().generated_tokens > before, timeout_s=60, what="the first token"
        )
        assert system.load().kv_blocks_used > 0
    assert until_idle(system) < 1.0
    assert system.load().generated_tokens < before + LONG["max_tokens"]


@STREAMED_OR_NOT
def test_a_close_in_prefill_frees_the_blocks_within_a_second(
    narrow_system: System, stream: bool
) -> None:
    system = narrow_system
    until_idle(system, timeout_s=60)
    before = system.load().generated_tokens
    # Not what the other case has left in the prefix cache.
    prompt = [10 + (i + stream) % 200 for i in range(PROMPT_TOKENS)]
    with system.sent(COMPLETIONS, prompt=prompt, max_tokens=64, ignore_eos=True, stream=stream):
        system.until(lambda: system.load().kv_blocks_used > 0, timeout_s=60, what="blocks in use")
    assert until_idle(system) < 1.0
    assert system.load().generated_tokens == before


@STREAMED_OR_NOT
def test_a_close_in_the_queue_ends_the_request_within_a_second(
    narrow_system: System, stream: bool
) -> None:
    system = narrow_system
    until_idle(system, timeout_s=60)
    with system.sent(CHAT, **LONG):
        system.until(lambda: system.load().running == 1, timeout_s=60, what="the first runs")
        with system.sent(CHAT, **LONG, stream=stream):
            system.until(lambda: system.load().waiting == 1, timeout_s=60, what="the second waits")
        seconds = system.until(
            lambda: system.stats().num_requests == 1, timeout_s=30, what="the second has ended"
        )
        assert seconds < 1.0
        assert system.load().running == 1
    assert until_idle(system) < 1.0
