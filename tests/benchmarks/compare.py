"""Two OpenAI-compatible servers side by side: they take turns, and ratios of medians count.

    python -m tests.benchmarks.compare --ours URL --ours-model NAME --ours-pid PID \\
        --theirs URL --theirs-model NAME --theirs-pid PID

Give the pids of the servers' first processes: whose turn it is not is stopped (SIGSTOP) with all
its children. Absolute figures depend on the hour; ratios within one run hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.benchmarks.load import LoadClient
from tests.benchmarks.workloads import (
    GOALS,
    WORKLOADS,
    Figures,
    measure,
    medians,
    warm_up,
    workload_names,
)

SETTLE_S = 1.0
"""How long a server that goes on may find out that time has passed."""


@dataclass
class Side:
    """One server.

    Attributes:
        pid: Of its first process; ``None`` = it is never stopped.
        may_merge: Whether it may send several tokens in one chunk.
        figures: Of each repetition.
    """

    name: str
    url: str
    model: str
    pid: int | None
    may_merge: bool = False
    figures: list[Figures] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the server."""
        if self.pid is None:
            return
        first = psutil.Process(self.pid)
        for process in [first, *first.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@contextlib.contextmanager
def turn_of(side: Side, other: Side) -> Iterator[None]:
    """Only one of the two runs inside; both do afterwards."""
    other.signal(signal.SIGSTOP)
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        other.signal(signal.SIGCONT)


async def run_one(side: Side, name: str, seed: str) -> Figures:
    """One workload on one server."""
    async with LoadClient(side.url, model=side.model) as client:
        await warm_up(client, seed)
        return await measure(name, client, seed, may_merge=side.may_merge)


def take_turns(sides: Sequence[Side], names: Sequence[str], *, repetitions: int, seed: str) -> None:
    """Every workload on both servers, the order changing from repetition to repetition."""
    ours, theirs = sides
    for repetition in range(repetitions):
        for side in sides:
            side.figures.append({})
        for name in names:
            turns = [(ours, theirs), (theirs, ours)]
            for side, other in turns if repetition % 2 == 0 else reversed(turns):
                with turn_of(side, other):
                    figures = asyncio.run(run_one(side, name, f"{seed} {repetition} {name}"))
                side.figures[-1].update(figures)
                shown = "  ".join(f"{key.partition('.')[2]} {v:.4g}" for key, v in figures.items())
                print(f"{repetition + 1}/{repetitions} {side.name:7} {name:7} {shown}", flush=True)


def table(ours: Figures, theirs: Figures) -> list[str]:
    """A line per figure: both medians, their ratio, and the goal where there is one."""
    lines = [f"{'figure':26} {'ours':>10} {'theirs':>10} {'ratio':>7}  goal"]
    for name in ours:
        ratio = ours[name] / theirs[name]
        goal = GOALS.get(name)
        verdict = "" if goal is None else f"{goal} {'met' if goal.is_met(ratio) else 'MISSED'}"
        lines.append(f"{name:26} {ours[name]:10.2f} {theirs[name]:10.2f} {ratio:7.3f}  {verdict}")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two OpenAI-compatible servers side by side.")
    for side in ("ours", "theirs"):
        parser.add_argument(f"--{side}", required=True, metavar="URL")
        parser.add_argument(f"--{side}-model", default="smollm2", metavar="NAME")
        parser.add_argument(f"--{side}-pid", type=int, metavar="PID")
    parser.add_argument(
        "--theirs-may-merge",
        action="store_true",
        help="go on if theirs sends several tokens in one chunk; ours never may",
    )
    parser.add_argument("--only", type=workload_names, default=list(WORKLOADS), metavar="A,B")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", default=str(int(time.time())), help="never use one twice")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the file."""
    args = parse()
    ours = Side("ours", args.ours, args.ours_model, args.ours_pid)
    theirs = Side("theirs", args.theirs, args.theirs_model, args.theirs_pid, args.theirs_may_merge)
    take_turns([ours, theirs], args.only, repetitions=args.repetitions, seed=args.seed)
    found = {side.name: medians(side.figures) for side in (ours, theirs)}
    print("\n".join(table(found["ours"], found["theirs"])))
    if args.json is not None:
        repetitions = {side.name: side.figures for side in (ours, theirs)}
        report = {"medians": found, "repetitions": repetitions}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
