"""``sluiceway serve``: settings, pull, ports, children, what the user sees, the end."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TextIO

from services import __version__
from services.common.errors import EXIT_KILLED
from services.launcher.child import Child
from services.launcher.logs import format_event, format_json, format_text, parse_event
from services.launcher.plan import ChildSpec, plan_children, port_wishes
from services.launcher.ports import choose_ports
from services.launcher.pull import Pull
from services.launcher.restart import RestartPolicy
from services.launcher.screen import Screen
from services.launcher.settings import GivenFlags, Settings, resolve_settings
from services.launcher.supervisor import Supervisor

if TYPE_CHECKING:
    from services.launcher.view import View


def serve(model: str | None, given: GivenFlags, *, out: TextIO) -> int:
    """Serve a model until the user stops it.

    Args:
        model: ``smollm2``, a directory, or a hub id; ``None`` = the default one.
        given: Flags of the command line.
        out: Where everything is shown.

    Returns:
        0 after a drain, 1 if a child could not be kept, 130 if the user did not wait.

    Raises:
        ConfigError: A setting cannot be used, a port is taken, or the model cannot be had.
    """
    started_at = time.monotonic()
    settings = resolve_settings(model, given)
    ports = choose_ports(port_wishes(settings), seed=os.getpid())
    screen = Screen(
        out,
        is_terminal=out.isatty(),
        as_json=settings.serve.config.log_format == "json",
    )
    return asyncio.run(_serve(settings, ports, screen=screen, started_at=started_at))


async def _serve(
    settings: Settings, ports: Sequence[int], *, screen: Screen, started_at: float
) -> int:
    screen.line(f"sluiceway {__version__}: serving {settings.model}")
    pull = Pull(settings.model, screen=screen)
    _on_signals(pull.stop)
    try:
        model_dir = await pull.run()
    except asyncio.CancelledError:
        return EXIT_KILLED
    token = settings.services["gateway"].config.cluster_token or secrets.token_urlsafe(32)
    specs = plan_children(
        settings, model_dir=model_dir, ports=ports, cluster_token=token, parent_pid=os.getpid()
    )
    supervisor = _supervisor(settings, specs, screen=screen)
    _on_signals(supervisor.stop)
    async with AsyncExitStack() as stack:

        @functools.cache
        def view() -> View:
            # Only now, when the children have been started: what this imports takes as long as
            # everything that had to come before them.
            from services.launcher.probes import Probes
            from services.launcher.view import View

            probes = Probes(cluster_token=token)
            stack.push_async_exit(probes)
            return View(supervisor.children, settings, probes=probes, screen=screen)

        return await supervisor.run(
            until_ready=lambda: view().until_ready(started_at=started_at),
            while_ready=lambda: view().show_traffic(),
            until_back=lambda child: view().until_back(child),
            until_drained=lambda deadline: view().count_down(deadline),
        )


def _on_signals(handler: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)


def _supervisor(settings: Settings, specs: Sequence[ChildSpec], *, screen: Screen) -> Supervisor:
    configs = [loaded.config for loaded in settings.services.values()]
    return Supervisor(
        specs,
        screen=screen,
        on_line=_json_logger(screen) if screen.as_json else _logger(screen),
        policy=RestartPolicy() if settings.serve.config.restart else None,
        drain_timeout_s=max(config.drain_timeout_s for config in configs),
    )


def _logger(screen: Screen) -> Callable[[Child, str], None]:
    def show(child: Child, line: str) -> None:
        event = parse_event(line)
        if event is None:
            screen.line(format_text(child.name, line))
        else:
            screen.line(format_event(child.name, event, color=screen.is_terminal))

    return show


def _json_logger(screen: Screen) -> Callable[[Child, str], None]:
    return lambda child, line: screen.raw(format_json(child.name, line))
