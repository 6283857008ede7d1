"""One process beside the runner in a bare loop: both do the same work, some steps each in turn.

Whole runs that follow one another differ by a tenth where a machine's speed drifts; of a few steps
each, taken in turn, both get the same of it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from services.offline import LLM
from services.worker.executor import StepTimes
from services.worker.runner.model_runner import ModelRunner
from tests.benchmarks.work import Work
from tests.unit.worker.runner.driver import Driver

STEPS_PER_TURN = 4


class _Turns(list[StepTimes]):
    """The times of an engine's steps, which hold the engine up wherever its turn ends."""

    def __init__(self) -> None:
        super().__init__()
        self._begins, self._ends = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = self._is_free = False

    def append(self, times: StepTimes) -> None:
        """A step has run."""
        super().append(times)
        if len(self) % STEPS_PER_TURN == 0 and not self._is_free:
            self._ends.release()
            self.enter()

    def enter(self) -> None:
        """Wait for the engine's turn."""
        self._begins.acquire()

    def end(self) -> None:
        """The engine has nothing left to do."""
        self._is_over = True
        self._ends.release()

    def take(self) -> float:
        """Let the engine have its turn; gives its seconds."""
        began = time.perf_counter()
        self._begins.release()
        self._ends.acquire()
        assert not self._is_over, "the engine ended before its turns did"
        return time.perf_counter() - began

    def let_go(self) -> None:
        """Let the engine go on to its end."""
        self._is_free = True
        self._begins.release()


def share_of_bare_loop(llm: LLM, runner: ModelRunner, work: Work, *, block_size: int) -> float:
    """The bare loop's speed as a share of the single process's, median of the turns.

    Args:
        llm: The single process.
        runner: Like the one in ``llm``.
        work: Its number of tokens is a multiple of ``STEPS_PER_TURN``, and all its prompts fit
            into one step.
        block_size: Of the runner.
    """
    turns = llm.trace.times = _Turns()

    def generate() -> None:
        turns.enter()
        try:
            llm.generate(work.prompts, work.sampling)
        finally:
            turns.end()

    steps = _bare_steps(runner, work, block_size=block_size)
    shares = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        generating = pool.submit(generate)
        try:
            for turn in range(work.num_tokens // STEPS_PER_TURN):
                # Whoever is second of one pair is first of the next.
                first = turns.take() if turn % 2 else _take(steps)
                second = _take(steps) if turn % 2 else turns.take()
                shares.append(first / second if turn % 2 else second / first)
        finally:
            turns.let_go()
        generating.result()
    llm.trace.times = []
    return statistics.median(shares)


def _take(steps: Iterator[None]) -> float:
    began = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        next(steps)
    return time.perf_counter() - began


def _bare_steps(runner: ModelRunner, work: Work, *, block_size: int) -> Iterator[None]:
    """All prompts in one step, then one token each a step; nothing is scheduled or sent."""
    runner.reset()
    driver = Driver(runner, block_size=block_size)
    handles = range(1, len(work.prompts) + 1)
    for handle, prompt in zip(handles, work.prompts, strict=True):
        driver.add(handle, prompt, work.sampling)
    runner.execute(driver.plan({handle: len(work.prompts[0]) for handle in handles}))
    yield
    for _ in range(work.num_tokens - 1):
        runner.execute(driver.plan(dict.fromkeys(handles, 1)))
        yield
