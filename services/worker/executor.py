"""Runs the model's work in a thread of its own, so that the I/O loop is never held up.

``submit(step bytes) -> Future(result bytes)`` is the seam: one thread for one rank here, processes
for several ranks later, and nothing above it changes. A caller in this process may also hand over
a ``Step``, and gets the result as it likes. Jobs run one at a time, in the order of submission.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from llguidance import LLMatcher

from services.common.errors import InvariantError
from services.common.sampling import Constraint
from services.common.telemetry import get_logger
from services.worker.convert import failure_to_bytes, result_to_bytes, step_from_bytes
from services.worker.runner.build import Built, RunnerFacts
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.step_input import Step
from services.worker.runner.step_output import StepOutput
from services.worker.sampling.grammar_compiler import GrammarCompiler

log = get_logger(__name__)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long one step took, in seconds, and what it did.

    Attributes:
        total_s: From taking it up to the result as it is handed on.
        device_s: Of that, in forward and sampling.
        gap_s: From the end of the step before to the start of this one.
        num_tokens: Tokens that went through the model.
        num_rows: Rows in use after it.
        has_failed: An exception ended it.
    """

    total_s: float
    device_s: float
    gap_s: float
    num_tokens: int
    num_rows: int
    has_failed: bool


@dataclass(frozen=True, slots=True)
class ResultForm(Generic[R]):
    """What the result of a step is handed on as; made in the executor's thread.

    Attributes:
        of_output: Of what the runner gave, and the seconds since the step before ended.
        of_failure: Of the step's number and the exception that ended it.
    """

    of_output: Callable[[StepOutput, float], R]
    of_failure: Callable[[int, Exception], R]


_WIRE_FORM = ResultForm(result_to_bytes, failure_to_bytes)


class Executor:
    """Owns the thread and, once ``load`` is done, the runner.

    Any method may be called from any thread; the jobs they start run one after another.
    """

    def __init__(self, *, num_threads: int | None, on_step: Callable[[StepTimes], None]) -> None:
        """
        Args:
            num_threads: Threads of one torch operation; ``None`` = torch's choice.
            on_step: Told of every step, in the executor's thread.
        """
        self._pool = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="executor",
            initializer=_set_threads,
            initargs=(num_threads,),
        )
        # Grammars are compiled beside the steps. What they are compiled to is installed between
        # two steps, in the order in which it was asked for.
        self._grammar_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._on_step = on_step
        self._runner: ModelRunner | None = None
        self._compiler: GrammarCompiler | None = None
        self._num_resets = 0
        self._started_at: float | None = None
        self._ended_at: float | None = None

    def load(self, build: Callable[[], Built]) -> Future[RunnerFacts]:
        """Build the runner in the thread; from then on steps run and grammars are compiled.

        Args:
            build: Takes seconds to minutes; what it raises is in the future.
        """

        def job() -> RunnerFacts:
            self._runner, self._compiler, facts = build()
            self._grammar_pool.submit(self._compiler.warm)
            return facts

        return self._pool.submit(job)

    def submit(self, frame: bytes) -> Future[bytes]:
        """Run a step after those submitted before.

        Args:
            frame: A serialised ``ScheduledStep``.

        Returns:
            A serialised ``StepResult``; a step that raised is one too. The future itself fails only
            if ``frame`` is no step, or no runner is loaded.
        """
        return self._pool.submit(self._step, partial(step_from_bytes, frame), _WIRE_FORM)

    def submit_step(self, step: Step, form: ResultForm[R]) -> Future[R]:
        """Run a step that is one already; order and errors as ``submit``."""
        return self._pool.submit(self._step, lambda: step, form)

    def prepare(self, ref: int, constraint: Constraint) -> Future[None]:
        """Compile a grammar; steps submitted after the future is done may name it.

        Raises:
            InvalidRequest: In the future: the constraint cannot be enforced.
        """
        return self._grammar_pool.submit(self._prepare, ref, constraint, self._num_resets)

    def release(self, refs: Sequence[int]) -> None:
        """No step submitted after this one names these grammars."""
        # By the same way as ``prepare``, so that it does not overtake what it releases.
        self._grammar_pool.submit(self._pool.submit, self._release, refs)

    def reset(self) -> Future[None]:
        """Drop all rows and grammars once the steps submitted before are done."""
        return self._pool.submit(self._reset)

    def step_age_s(self) -> float:
        """How long the step that runs now has been running; 0 if none does."""
        started_at = self._started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    @property
    def num_rows(self) -> int:
        """Requests that have a row."""
        return 0 if self._runner is None else self._runner.num_rows

    def close(self) -> None:
        """Let the job that runs end and start no other."""
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, ref: int, constraint: Constraint, num_resets: int) -> None:
        if self._compiler is None:
            raise InvariantError("a grammar came before the model was loaded")
        matcher = self._compiler.compile(constraint)
        self._pool.submit(self._install, ref, matcher, num_resets)

    def _install(self, ref: int, matcher: LLMatcher, num_resets: int) -> None:
        # One that was asked for by an engine that is gone means nothing to the next.
        if self._runner is not None and num_resets == self._num_resets:
            self._runner.grammars.install(ref, matcher)

    def _release(self, refs: Sequence[int]) -> None:
        if self._runner is not None:
            self._runner.grammars.drop(refs)

    def _reset(self) -> None:
        self._num_resets += 1
        self._ended_at = None
        if self._runner is not None:
            self._runner.reset()

    def _step(self, take: Callable[[], Step], form: ResultForm[R]) -> R:
        started = time.monotonic()
        self._started_at = started
        try:
            return self._run(take, form, started)
        finally:
            self._started_at = None
            self._ended_at = time.monotonic()

    def _run(self, take: Callable[[], Step], form: ResultForm[R], started: float) -> R:
        if self._runner is None:
            raise InvariantError("a step came before the model was loaded")
        gap_s = 0.0 if self._ended_at is None else started - self._ended_at
        step = take()
        device_s, num_tokens, has_failed = 0.0, 0, False
        try:
            output = self._runner.execute(step)
            result = form.of_output(output, gap_s)
            device_s, num_tokens = output.device_s, output.num_tokens
        except Exception as error:  # the one boundary that reports: a step fails, not the worker
            log.exception("step_failed", step=step.step)
            self._runner.forget(step)
            result, has_failed = form.of_failure(step.step, error), True
        self._on_step(
            StepTimes(
                total_s=time.monotonic() - started,
                device_s=device_s,
                gap_s=gap_s,
                num_tokens=num_tokens,
                num_rows=self._runner.num_rows,
                has_failed=has_failed,
            )
        )
        return result


def _set_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
