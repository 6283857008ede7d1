"""Shows how the children are: progress until they are ready, then traffic, at last a countdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.launcher import report
from services.launcher.child import Child
from services.launcher.probes import Probes, Traffic, WorkerState
from services.launcher.screen import Screen
from services.launcher.settings import Settings, served_name

_PROGRESS_S = 0.25
_COUNTDOWN_S = 0.5
_TRAFFIC_S = 10.0
_PLAIN_COUNTDOWN_S = 5


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
        try:
            async with asyncio.TaskGroup() as tasks:
                waits = {tasks.create_task(self.until_back(c)): c for c in self._children}
                ticker = tasks.create_task(self._show_progress(waits, started_at=started_at))
                await asyncio.wait(waits)
                ticker.cancel()
        finally:
            self._screen.status("", milestone="")
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

    async def show_traffic(self) -> None:
        """Every ten seconds a line about what went through, unless nothing did; until cancelled."""
        before, since = Traffic(), time.monotonic()
        while True:
            await asyncio.sleep(_TRAFFIC_S)
            now, at = await self._probes.traffic(self._address("scheduler")), time.monotonic()
            if now is None:
                continue
            text = report.traffic(before, now, seconds=at - since)
            if text is not None:
                self._screen.line(text)
            before, since = now, at

    async def count_down(self, deadline: float) -> None:
        """Show how many requests are left and how long they may take, until cancelled."""
        try:
            while True:
                await self._show_draining(deadline)
                await asyncio.sleep(_COUNTDOWN_S)
        finally:
            self._screen.status("", milestone="")

    async def _show_draining(self, deadline: float) -> None:
        traffic = await self._probes.traffic(self._address("scheduler"))
        num_requests = traffic.requests if traffic is not None else None
        seconds_left = max(0.0, deadline - time.monotonic())
        self._screen.status(
            report.draining(num_requests, seconds_left=seconds_left),
            milestone=f"draining {num_requests} {seconds_left // _PLAIN_COUNTDOWN_S}",
        )

    def _address(self, service: str) -> str:
        return next(c.spec.address for c in self._children if c.spec.service == service)
