"""The executor: one thread, jobs in order, exceptions as results."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from services.common.errors import InvalidRequest, InvariantError
from services.common.pb import worker_pb2
from services.common.sampling import Constraint, ConstraintKind
from services.worker.convert import step_from_bytes
from services.worker.executor import Executor, ResultForm, StepTimes
from services.worker.runner.build import Built
from services.worker.runner.step_input import Step
from services.worker.runner.step_output import StepOutput


class FakeGrammars:
    """Notes in which order it is told of grammars."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def install(self, ref: int, matcher: object) -> None:
        """Rows may name it."""
        self.events.append(("install", (ref, matcher)))

    def drop(self, refs: Sequence[int]) -> None:
        """No row names them any more."""
        self.events.append(("drop", refs))


class FakeCompiler:
    """Compiles a constraint to its text; waits for ``go`` if it is "slow"."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.is_warm = threading.Event()

    def warm(self) -> None:
        """It is about to be used."""
        self.is_warm.set()

    def compile(self, constraint: Constraint) -> str:
        """Fail for "bad"."""
        if constraint.spec == "slow":
            assert self.go.wait(60)
        if constraint.spec == "bad":
            raise InvalidRequest("bad")
        return constraint.spec


class FakeRunner:
    """Counts what it is given; step 13 fails, step 99 waits for ``go``."""

    def __init__(self) -> None:
        self.compiler = FakeCompiler()
        self.seen: list[int] = []
        self.forgotten: list[int] = []
        self.num_resets = 0
        self.num_rows = 3
        self.threads: set[str] = set()
        self.grammars = FakeGrammars()
        self.go = threading.Event()
        self.is_waiting = threading.Event()

    def execute(self, step: Step) -> StepOutput:
        """Answer at once."""
        self.threads.add(threading.current_thread().name)
        self.seen.append(step.step)
        if step.step == 99:
            self.is_waiting.set()
            assert self.go.wait(60)
        if step.step == 13:
            raise ValueError("unlucky")
        return StepOutput(step.step, step.handles, [0] * len(step.handles), [], num_tokens=5)

    def forget(self, step: Step) -> None:
        """A step has failed."""
        self.forgotten.append(step.step)

    def reset(self) -> None:
        """Rows are dropped."""
        self.num_resets += 1


@pytest.fixture
def times() -> list[StepTimes]:
    """What ``on_step`` was told."""
    return []


@pytest.fixture
def executor(times: list[StepTimes]) -> Iterator[Executor]:
    """An executor without a runner."""
    executor = Executor(num_threads=1, on_step=times.append)
    yield executor
    executor.close()


def load(executor: Executor) -> FakeRunner:
    """Give it a fake runner and a fake compiler."""
    runner = FakeRunner()
    built = Built(runner, runner.compiler, "facts")  # type: ignore[arg-type]
    assert executor.load(lambda: built).result(60) == "facts"
    assert runner.compiler.is_warm.wait(60)
    return runner


def frame(step: int) -> bytes:
    """A step with one row."""
    message = worker_pb2.ScheduledStep(step=step, handle=[7], num_tokens=[1], num_new_blocks=[0])
    return message.SerializeToString()


def test_steps_run_in_one_thread_in_the_order_of_submission(
    executor: Executor, times: list[StepTimes]
) -> None:
    runner = load(executor)
    futures = [executor.submit(frame(step)) for step in range(1, 6)]
    results = [worker_pb2.StepResult.FromString(future.result(60)) for future in futures]
    assert [result.step for result in results] == [1, 2, 3, 4, 5] == runner.seen
    assert runner.threads == {"executor_0"}
    assert [entry.num_tokens for entry in times] == [5] * 5


def test_an_exception_becomes_a_failed_result_and_the_next_step_runs(
    executor: Executor, times: list[StepTimes]
) -> None:
    runner = load(executor)
    failed = worker_pb2.StepResult.FromString(executor.submit(frame(13)).result(60))
    assert (failed.step, failed.failed.error_class, failed.failed.message) == (
        13,
        "ValueError",
        "unlucky",
    )
    assert runner.forgotten == [13]
    after = worker_pb2.StepResult.FromString(executor.submit(frame(14)).result(60))
    assert not after.HasField("failed")
    assert [entry.has_failed for entry in times] == [True, False]


def test_a_step_from_this_process_gives_its_result_in_the_form_that_was_asked_for(
    executor: Executor,
) -> None:
    runner = load(executor)
    form: ResultForm[tuple[object, ...]] = ResultForm(
        lambda output, gap_s: (output.step, output.handles, gap_s),
        lambda step, error: (step, str(error)),
    )
    first, bad, last = (
        executor.submit_step(step_from_bytes(frame(step)), form) for step in (1, 13, 14)
    )
    assert first.result(60) == (1, [7], 0.0)
    assert bad.result(60) == (13, "unlucky")
    assert last.result(60)[:2] == (14, [7])
    assert runner.seen == [1, 13, 14] and runner.forgotten == [13]


def test_what_is_no_step_fails_its_future(executor: Executor) -> None:
    load(executor)
    with pytest.raises(DecodeError):
        executor.submit(b"\xff\xff").result(60)


def test_a_step_before_the_model_is_loaded_fails_its_future(executor: Executor) -> None:
    with pytest.raises(InvariantError, match="before the model was loaded"):
        executor.submit(frame(1)).result(60)


def test_a_reset_waits_for_the_steps_before_it(executor: Executor) -> None:
    runner = load(executor)
    executor.submit(frame(99))
    assert runner.is_waiting.wait(60)
    reset = executor.reset()
    assert not reset.done()
    runner.go.set()
    reset.result(60)
    assert runner.num_resets == 1


def test_the_age_is_that_of_the_running_step(executor: Executor) -> None:
    runner = load(executor)
    assert executor.step_age_s() == 0
    future = executor.submit(frame(99))
    assert runner.is_waiting.wait(60)
    time.sleep(0.02)
    assert executor.step_age_s() >= 0.02
    runner.go.set()
    future.result(60)
    assert executor.step_age_s() == 0


def test_the_gap_is_the_time_between_steps(executor: Executor, times: list[StepTimes]) -> None:
    load(executor)
    executor.submit(frame(1)).result(60)
    time.sleep(0.03)
    result = worker_pb2.StepResult.FromString(executor.submit(frame(2)).result(60))
    assert result.gap_us >= 30_000
    assert np.isclose(times[1].gap_s, result.gap_us / 1e6, atol=1e-5)
    # A new engine has no step before.
    executor.reset().result(60)
    assert worker_pb2.StepResult.FromString(executor.submit(frame(3)).result(60)).gap_us == 0


def regex(spec: str) -> Constraint:
    """A constraint for the fake compiler."""
    return Constraint(ConstraintKind.REGEX, spec)


def test_grammars_are_compiled_beside_the_steps_and_installed_between_them(
    executor: Executor,
) -> None:
    runner = load(executor)
    slow = executor.prepare(1, regex("slow"))
    executor.submit(worker_pb2.ScheduledStep(step=1).SerializeToString()).result(60)
    assert runner.seen == [1] and runner.grammars.events == []
    executor.release([1])
    runner.compiler.go.set()
    slow.result(60)
    executor.prepare(2, regex("a")).result(60)
    executor.submit(worker_pb2.ScheduledStep(step=2).SerializeToString()).result(60)
    assert runner.grammars.events == [
        ("install", (1, "slow")),
        ("drop", [1]),
        ("install", (2, "a")),
    ]


def test_a_grammar_of_an_engine_that_is_gone_is_not_installed_for_the_next(
    executor: Executor,
) -> None:
    runner = load(executor)
    slow = executor.prepare(1, regex("slow"))
    executor.reset().result(60)
    runner.compiler.go.set()
    slow.result(60)
    executor.submit(worker_pb2.ScheduledStep(step=1).SerializeToString()).result(60)
    assert runner.grammars.events == []


def test_a_grammar_that_cannot_be_compiled_fails_its_own_future(executor: Executor) -> None:
    with pytest.raises(InvariantError, match="before the model"):
        executor.prepare(1, regex("a")).result(60)
    load(executor)
    with pytest.raises(InvalidRequest, match="bad"):
        executor.prepare(1, regex("bad")).result(60)
    executor.prepare(2, regex("a")).result(60)
