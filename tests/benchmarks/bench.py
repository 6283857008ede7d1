"""How fast ``sluiceway serve`` answers: every workload, a table and a JSON file.

    python -m tests.benchmarks.bench [--model smollm2] [--only single,batch] [--repetitions 3] ...

Medians over the repetitions. Absolute figures of one machine: to compare servers, let them take
turns (``tests/benchmarks/compare.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from services.pull import ensure_model
from tests.benchmarks.load import LoadClient
from tests.benchmarks.workloads import (
    WORKLOADS,
    Figures,
    measure,
    medians,
    warm_up,
    workload_names,
)
from tests.e2e.system import System

MODEL_NAME = "bench"


async def run(url: str, names: Sequence[str], *, repetitions: int, seed: str) -> list[Figures]:
    """The figures of each repetition."""
    found = []
    async with LoadClient(url, model=MODEL_NAME) as client:
        await warm_up(client, seed)
        for repetition in range(repetitions):
            figures: Figures = {}
            for name in names:
                figures |= await measure(name, client, f"{seed} {repetition} {name}")
            found.append(figures)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How fast `sluiceway serve` answers.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", type=workload_names, default=list(WORKLOADS), metavar="A,B")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", default=str(int(time.time())), help="never use one twice")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), metavar="FILE")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags for `sluiceway serve`")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the file."""
    args = parse()
    model_dir = ensure_model(args.model)
    with (
        tempfile.TemporaryDirectory() as logs,
        System(
            model_dir,
            f"--served-model-name={MODEL_NAME}",
            *args.serve_flags,
            log_file=Path(logs) / "serve.txt",
        ) as system,
    ):
        system.until_ready()
        found = asyncio.run(
            run(system.url, args.only, repetitions=args.repetitions, seed=args.seed)
        )
    for name, value in medians(found).items():
        print(f"{name:26} {value:10.3f}")
    report = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": args.model,
        "serve_flags": args.serve_flags,
        "medians": medians(found),
        "repetitions": found,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
