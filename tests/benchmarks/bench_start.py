"""From starting a server to the first token of a request that is sent at once.

    python -m tests.benchmarks.bench_start [--model smollm2] [--repetitions 5]
    python -m tests.benchmarks.bench_start --url http://127.0.0.1:8100 -- vllm serve DIR --port 8100

The request is tried again and again from the beginning, until it is answered. Everything that is
built or converted on first use must be there: the first start does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import aiohttp

from services.launcher.ports import PortWish, choose_ports
from tests.benchmarks.load import LoadClient, LoadError

TIMEOUT_S = 600.0
RETRY_S = 0.05
END_S = 60.0


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own; all of it ends with the block."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def until_first_token(url: str, model: str, *, of: subprocess.Popen[bytes]) -> None:
    """Ask for a token until one comes.

    Raises:
        LoadError: The server has ended instead.
    """
    async with asyncio.timeout(TIMEOUT_S), LoadClient(url, model=model) as client:
        while True:
            try:
                await client.stream("Once upon a time", 1)
            except (aiohttp.ClientError, LoadError):
                if of.poll() is not None:
                    raise LoadError(f"the server ended with exit code {of.returncode}") from None
                await asyncio.sleep(RETRY_S)
            else:
                return


def measure(command: Sequence[str], url: str, model: str) -> float:
    """One start, in seconds."""
    began = time.perf_counter()
    with started(command) as process:
        asyncio.run(until_first_token(url, model, of=process))
        return time.perf_counter() - began


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How long a server takes to its first token.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--url", help="of the command; default: `sluiceway serve MODEL`")
    parser.add_argument("command", nargs="*", help="after --: another server's command line")
    return parser.parse_args()


def main() -> None:
    """Print every start and the median."""
    args = parse()
    command, url = args.command, args.url
    if not command:
        wish = PortWish(owner="bench", flag="", host="127.0.0.1", port=0, is_firm=False)
        (port,) = choose_ports([wish], seed=time.time_ns())
        command = [sys.executable, "-m", "services.cli", "serve", args.model, f"--port={port}"]
        url = f"http://127.0.0.1:{port}"
    times = []
    for repetition in range(args.repetitions + 1):
        seconds = measure(command, url, args.model)
        print(f"{seconds:6.2f} s{'' if repetition else '  (does not count)'}", flush=True)
        if repetition:
            times.append(seconds)
    print(f"median {statistics.median(times):.2f} s")


if __name__ == "__main__":
    main()
