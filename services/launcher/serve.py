"""``sluiceway serve``: settings, pull, ports, children, what the user sees, the end."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from services import __version__
from services.common.lifecycle import EXIT_KILLED
from services.launcher import report
from services.launcher.child import Child
from services.launcher.logs import format_event, format_json, format_text, parse_event
from services.launcher.plan import ChildSpec, plan_children, port_wishes
from services.launcher.ports import choose_ports
from services.launcher.probes import Probes, WorkerState
from services.launcher.pull import Pull
from services.launcher.restart import RestartPolicy
from services.launcher.screen import Screen
from services.launcher.settings import GivenFlags, Settings, resolve_settings, served_name
from services.launcher.supervisor import Supervisor

_PROGRESS_S = 0.25
_COUNTDOWN_S = 0.5
_PLAIN_COUNTDOWN_S = 5


def serve(model: str, given: GivenFlags, *, out: TextIO) -> int:
    """Serve a model until the user stops it.

    Args:
        model: ``smollm2``, a directory, or a hub id.
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
    async with Probes(cluster_token=token) as probes:
        view = View(supervisor.children, settings, probes=probes, screen=screen)
        return await supervisor.run(
            until_ready=lambda: view.until_ready(started_at=started_at),
            until_back=view.until_back,
            until_drained=view.count_down,
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


class View:
    """What the user sees of the children: how far they are, who they are, when they are ready."""

    def __init__(
        self, children: Sequence[Child], settings: Settings, *, probes: Probes, screen: Screen
    ) -> None:
        """
        Args:
            children: All of them.
            settings: What they were started with.
            probes: How they are asked.
            screen: Where it is shown.
        """
        self._children = children
        self._settings = settings
        self._probes = probes
        self._screen = screen

    async def until_ready(self, *, started_at: float) -> None:
        """Show progress until every child is ready, then the table and what to paste."""
        async with asyncio.TaskGroup() as tasks:
            pending = {tasks.create_task(self.until_back(child)): child for child in self._children}
            ticker = tasks.create_task(self._show_progress(pending, started_at=started_at))
            await asyncio.wait(pending)
            ticker.cancel()
        self._screen.status("", milestone="ready")
        await self._show_ready(seconds=time.monotonic() - started_at)

    async def until_back(self, child: Child) -> None:
        """Return once one child is ready."""
        if child.spec.service == "gateway":
            await self._probes.until_gateway_ready(child.spec.url)
        else:
            await self._probes.until_ready(child.spec.address)

    async def _show_progress(
        self, waits: dict[asyncio.Task[None], Child], *, started_at: float
    ) -> None:
        while True:
            pending = [child for task, child in waits.items() if not task.done()]
            names = [child.name for child in pending]
            states = await self._worker_states(pending)
            seconds = time.monotonic() - started_at
            self._screen.status(
                report.progress(states, names, seconds=seconds),
                milestone=report.milestone(states, names),
            )
            await asyncio.sleep(_PROGRESS_S)

    async def _worker_states(self, children: Sequence[Child]) -> dict[str, WorkerState]:
        states = {}
        for child in children:
            if child.spec.service == "worker":
                state = await self._probes.worker_state(child.spec.address)
                states[child.name] = state or WorkerState()
        return states

    async def _show_ready(self, *, seconds: float) -> None:
        states = await self._worker_states(self._children)
        rows = [
            report.Row(child.name, child.pid, child.spec.url, states.get(child.name))
            for child in self._children
        ]
        url = next(c.spec.url for c in self._children if c.spec.service == "gateway")
        lines = ["", *report.table(rows), ""]
        lines += [f"API {url}/v1   docs {url}/docs   metrics {url}/metrics", ""]
        lines += [f"ready in {seconds:.1f} s - {url}", ""]
        lines += [*self._snippets(url), ""]
        for line in lines:
            self._screen.line(line)

    def _snippets(self, url: str) -> list[str]:
        gateway = self._settings.services["gateway"].config
        name = getattr(gateway, "served_model_name", None) or served_name(self._settings.model)
        return report.snippets(url, model=name, needs_key=bool(getattr(gateway, "api_key", None)))

    async def count_down(self, deadline: float) -> None:
        """Show how many requests are left and how long they may take, until cancelled."""
        scheduler = next(c.spec.address for c in self._children if c.spec.service == "scheduler")
        while True:
            num_requests = await self._probes.num_requests(scheduler)
            seconds_left = max(0.0, deadline - time.monotonic())
            self._screen.status(
                report.draining(num_requests, seconds_left=seconds_left),
                milestone=f"draining {num_requests} {seconds_left // _PLAIN_COUNTDOWN_S}",
            )
            await asyncio.sleep(_COUNTDOWN_S)
