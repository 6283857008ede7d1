"""Microseconds of the scheduler core per row and step, in a steady decode batch.

    python -m tests.benchmarks.bench_scheduler_core [rows ...]

The median over the steps counts: on a machine shared with others the mean measures the others.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time

from services.common.block_hash import root_key
from services.common.sampling import SamplingParams
from services.scheduler.core.output import StepOutcome
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import EngineLimits, Scheduler

NUM_STEPS = 300
PROMPT_TOKENS = 20


def _scheduler(num_rows: int) -> Scheduler:
    scheduler = Scheduler(
        EngineLimits(
            num_blocks=num_rows * 40,
            block_size=16,
            max_model_len=8192,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(8192, num_rows * PROMPT_TOKENS),
            eos_token_ids=(2,),
            vocab_size=50_000,
            max_waiting=num_rows + 1,
        )
    )
    for handle in range(1, num_rows + 1):
        request = Request(
            handle=handle,
            request_id=str(handle),
            prompt_ids=[handle] * PROMPT_TOKENS,
            sampling=SamplingParams(max_tokens=NUM_STEPS),
            root_key=root_key("weights"),
            arrival_s=0.0,
        )
        scheduler.add([request], now=0.0)
    return scheduler


def measure(num_rows: int) -> tuple[float, float]:
    """Median microseconds per row of ``schedule`` and of ``apply``."""
    scheduler = _scheduler(num_rows)
    gc.collect()
    gc.freeze()
    schedule_us, apply_us = [], []
    in_flight = []
    while scheduler.has_work:
        began = time.perf_counter()
        plan = scheduler.schedule(now=0.0)
        took = time.perf_counter() - began
        if plan is not None:
            in_flight.append(plan)
            if plan.handles:
                schedule_us.append(1e6 * took / len(plan.handles))
            continue
        plan = in_flight.pop(0)
        num_rows_run = len(plan.handles)
        outcome = StepOutcome(
            step=plan.step,
            handles=plan.handles,
            num_sampled=[1] * num_rows_run,
            token_ids=[7] * num_rows_run,
        )
        began = time.perf_counter()
        scheduler.apply(outcome, now=0.0)
        if num_rows_run:
            apply_us.append(1e6 * (time.perf_counter() - began) / num_rows_run)
    return statistics.median(schedule_us), statistics.median(apply_us)


def main() -> None:
    """Print one line per batch size."""
    for num_rows in [int(arg) for arg in sys.argv[1:]] or [1, 16, 64, 256, 1024]:
        schedule_us, apply_us = measure(num_rows)
        print(
            f"rows {num_rows:5}  schedule {schedule_us:6.2f}  apply {apply_us:6.2f}  "
            f"together {schedule_us + apply_us:6.2f} us a row and step"
        )


if __name__ == "__main__":
    main()
