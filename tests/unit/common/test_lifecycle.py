"""The life of a service process: signals, drain, exit codes."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from services.common import lifecycle
from services.common.config import ServiceConfig
from services.common.errors import ConfigError, InvariantError
from services.common.lifecycle import EXIT_CONFIG, EXIT_FAILED, EXIT_KILLED, EXIT_OK, Lifecycle

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(autouse=True)
def no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test run keeps its own logging."""
    monkeypatch.setattr(lifecycle, "configure_logging", lambda *args, **kwargs: None)


def run(serve: Callable[[ServiceConfig, Lifecycle], Awaitable[None]], *flags: str) -> int:
    return lifecycle.run_service(ServiceConfig, section="worker", serve=serve, argv=list(flags))


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_lets_the_service_drain_and_the_exit_code_is_0(number: int) -> None:
    drained = []

    async def serve(config: ServiceConfig, life: Lifecycle) -> None:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(60):
            await life.stopping.wait()
        drained.append(config.drain_timeout_s)

    assert run(serve, "--drain-timeout-s", "3") == EXIT_OK
    assert drained == [3.0]


async def test_the_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    life = Lifecycle()
    life.stop()
    assert life.stopping.is_set() and exits == []
    life.stop()
    assert exits == [EXIT_KILLED]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such model"), EXIT_CONFIG),
        (InvariantError("broken"), EXIT_FAILED),
        (OSError("no such file"), EXIT_FAILED),
    ],
)
def test_an_expected_failure_is_an_exit_code_also_out_of_a_task_group(
    error: Exception, code: int
) -> None:
    async def fail() -> None:
        raise error

    async def serve(config: ServiceConfig, life: Lifecycle) -> None:
        await fail()

    async def serve_in_a_group(config: ServiceConfig, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            inner.create_task(fail())
            outer.create_task(asyncio.sleep(60))

    assert run(serve) == code
    assert run(serve_in_a_group) == code


def test_a_bug_is_not_hidden_behind_an_exit_code() -> None:
    async def serve(config: ServiceConfig, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(0))
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        run(serve)
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


def test_a_bad_setting_is_named_and_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(config: ServiceConfig, life: Lifecycle) -> None:
        raise AssertionError("must not be reached")

    assert run(serve, "--port", "70000") == EXIT_CONFIG
    assert "worker.port" in capsys.readouterr().err


async def fail_when_cancelled() -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise ValueError from None


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError


@pytest.mark.parametrize("also_fails", [False, True])
async def test_a_cancellation_that_comes_with_an_error_is_not_lost(also_fails: bool) -> None:
    has_failed = asyncio.Event()

    async def stay() -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(fail_when_cancelled())
                    if also_fails or not has_failed.is_set():
                        tasks.create_task(fail())
                    await asyncio.sleep(60)
            except* ValueError:
                has_failed.set()
            lifecycle.raise_if_cancelled()

    staying = asyncio.ensure_future(stay())
    async with asyncio.timeout(30):
        await has_failed.wait()
        await asyncio.sleep(0.01)
        assert not staying.done(), "an error alone is no cancellation"
        staying.cancel()
        await asyncio.wait([staying])
    assert staying.cancelled()
