"""Memory of a server beside its KV cache: PSS of all its processes once the whole cache was used.

    python -m tests.benchmarks.bench_memory [--model smollm2]
    python -m tests.benchmarks.bench_memory --url URL --pid PID --model NAME --pool-gib 1

PSS: what processes share counts once. The batch workload runs first; then come prompts enough to
fill the KV cache, so that every page of it has been touched and all of it can be subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from pathlib import Path

import psutil

from services.pull import ensure_model
from tests.benchmarks.load import LoadClient, words
from tests.benchmarks.workloads import measure
from tests.e2e.system import System

MODEL_NAME = "bench"
GIB = 1 << 30
PROMPT_TOKENS = 3400


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.M)
    assert found is not None, text
    return int(found[1]) * 1024


def pss_of_tree(pid: int) -> dict[str, int]:
    """PSS of a process and everything that it has started, by what they are."""
    first = psutil.Process(pid)
    return {
        f"{process.pid} {_name(process)}": pss_bytes(process.pid)
        for process in [first, *first.children(recursive=True)]
    }


def _name(process: psutil.Process) -> str:
    words_ = process.cmdline()
    return words_[words_.index("-m") + 1] if "-m" in words_ else process.name()


async def use_all(url: str, model: str, *, num_tokens: int) -> None:
    """The batch workload, then different prompts until so many tokens were in the KV cache."""
    seed = str(time.time_ns())
    async with LoadClient(url, model=model) as client:
        await measure("batch", client, seed)
        for i in range(-(-num_tokens // PROMPT_TOKENS)):
            await client.stream(words(PROMPT_TOKENS, seed=f"{seed} {i}"), 1)


def report(pid: int, pool_bytes: int) -> None:
    """Print the PSS of each process and what is left without the pool."""
    found = pss_of_tree(pid)
    for name, size in found.items():
        print(f"{size / 1e6:8.0f} MB  {name}")
    print(f"{pool_bytes / 1e6:8.0f} MB  KV pool")
    print(f"{(sum(found.values()) - pool_bytes) / 1e6:8.0f} MB  without the KV pool")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory of a server beside its KV cache.")
    parser.add_argument("--model", default="smollm2", help="to serve; with --url: its name there")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--pid", type=int, help="of its first process")
    parser.add_argument("--pool-gib", type=float, default=1.0)
    parser.add_argument("--pool-tokens", type=int, default=46_600, help="that it holds, or more")
    return parser.parse_args()


def main() -> None:
    """Measure a running server, or one that is started for it."""
    args = parse()
    pool_bytes = int(args.pool_gib * GIB)
    if args.url is not None:
        asyncio.run(use_all(args.url, args.model, num_tokens=args.pool_tokens))
        report(args.pid, pool_bytes)
        return
    flags = [f"--served-model-name={MODEL_NAME}", f"--kv-cache-memory-bytes={pool_bytes}"]
    with (
        tempfile.TemporaryDirectory() as logs,
        System(ensure_model(args.model), *flags, log_file=Path(logs) / "serve.txt") as system,
    ):
        system.until_ready()
        asyncio.run(use_all(system.url, MODEL_NAME, num_tokens=args.pool_tokens))
        report(system.launcher.pid, pool_bytes)


if __name__ == "__main__":
    main()
