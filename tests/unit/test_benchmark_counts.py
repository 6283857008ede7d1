"""What the benchmarks of the front end, of the start and of memory count."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys

import pytest

from tests.benchmarks.bench_frontend import Stream, mark_of
from tests.benchmarks.bench_memory import pss_bytes, pss_of_tree
from tests.benchmarks.bench_start import started, until_first_token
from tests.benchmarks.load import LoadError


class Transport(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def close(self) -> None:
        pass


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_with_one_token_are_counted_wherever_reads_cut_them(size: int) -> None:
    stream = Stream(b"GET", mark_of("completions"))
    stream.connection_made(Transport())
    one = b'data: {"choices":[{"text":" word"}]}\n\n'
    body = one * 3 + b'data: {"choices":[{"text":" word word"}]}\n\n' + one + b"data: [DONE]\n\n"
    for start in range(0, len(body), size):
        stream.data_received(body[start : start + size])
    assert stream.num_tokens == 4  # the one with two tokens is none
    assert stream.started.is_set()
    assert stream.done.is_set()


def test_pss_counts_touched_memory_of_a_process_and_of_its_children() -> None:
    before = pss_bytes(os.getpid())
    size = 64 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as pages:
        pages.write(b"x" * size)
        assert size * 0.9 < pss_bytes(os.getpid()) - before < size * 2.2
    code = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            assert any(name.startswith(f"{child.pid} ") for name in pss_of_tree(os.getpid()))
        finally:
            child.kill()


async def test_a_server_that_ends_before_its_first_token_is_not_waited_for() -> None:
    with started([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        with pytest.raises(LoadError, match="exit code 3"):
            await until_first_token("http://127.0.0.1:9", "m", of=process)
