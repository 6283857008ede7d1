"""The life of a service process: settings, logs, signals, drain, exit code.

The first SIGTERM or SIGINT asks the service to drain and return; the second ends the process at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop

from services.common.config import ServiceConfig, load_config
from services.common.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_KILLED,
    EXIT_OK,
    SERVICE_FAILED,
    ConfigError,
    SluicewayError,
)
from services.common.telemetry import configure_logging, get_logger

_PR_SET_PDEATHSIG = 1

log = get_logger(__name__)
C = TypeVar("C", bound=ServiceConfig)


class Lifecycle:
    """Whether this process has been asked to stop.

    Attributes:
        stopping: Set by the first signal; the service drains and returns.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()

    def stop(self) -> None:
        """Ask the service to drain; the second call ends the process at once."""
        if self.stopping.is_set():
            log.warning("killed_by_second_signal")
            sys.stdout.flush()
            os._exit(EXIT_KILLED)
        log.info("stopping")
        self.stopping.set()


def run_service(
    cls: type[C],
    *,
    section: str,
    serve: Callable[[C, Lifecycle], Awaitable[None]],
    argv: list[str] | None = None,
) -> int:
    """Run a service until it is asked to stop.

    Args:
        cls: Its config model.
        section: Its name.
        serve: Runs the service; returns once ``life.stopping`` is set and it has drained.
        argv: Flags; ``None`` = those of this process.

    Returns:
        The exit code: 0 after a drain, 2 for a bad setting, 1 for anything else.
    """
    try:
        config = load_config(cls, section=section, argv=argv).config
    except ConfigError as error:
        print(f"{section}: {error.message}", file=sys.stderr)  # noqa: T201 - no logs yet
        return EXIT_CONFIG
    if config.parent_pid is not None:
        die_with_parent(config.parent_pid)
    configure_logging(section, level=config.log_level, log_format=config.log_format)
    return _run(lambda: uvloop.run(_serve(config, serve)), section=section)


def _run(main: Callable[[], None], *, section: str) -> int:
    try:
        main()
    except (SluicewayError, OSError) as failure:
        errors: list[BaseException] = [failure]
    except BaseExceptionGroup as group:
        expected, rest = group.split((SluicewayError, OSError))
        if rest is not None:
            raise rest from None
        errors = _leaves(expected) if expected is not None else []
    else:
        return EXIT_OK
    for error in errors:
        log.error(SERVICE_FAILED, section=section, error=f"{type(error).__name__}: {error}")
    return EXIT_CONFIG if isinstance(errors[0], ConfigError) else EXIT_FAILED


async def _serve(config: C, serve: Callable[[C, Lifecycle], Awaitable[None]]) -> None:
    life = Lifecycle()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.stop)
    await serve(config, life)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def raise_if_cancelled() -> None:
    """Go on with a cancellation that a TaskGroup has kept to itself.

    One that is cancelled while its children fail raises their errors only (until Python 3.13): who
    catches them and goes on asks here first, or would go on for ever. The group's body must wait
    for something until the end: a child that fails after the body leaves a cancellation of the
    group's own behind, which cannot be told from one that is meant.

    Raises:
        asyncio.CancelledError: The current task is to end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def freeze_garbage() -> None:
    """Keep the collector away from what lives as long as the process.

    A full collection over a million objects stops every engine for more than 100 ms.
    """
    gc.collect()
    gc.freeze()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent dies (Linux; elsewhere a check now).

    Args:
        parent_pid: Who started this process; if it has died by now, this process ends.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(EXIT_KILLED)
