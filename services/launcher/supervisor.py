"""Keeps the children alive, and ends them: the life of one ``sluiceway serve``.

Until all are ready a dead child stops everything; after that it is started again on its own ports
while the others stay up. Stopping drains from the door inwards: gateway, tokenizer, scheduler,
workers, kvstore, so that what a child still does for the one before it is never cut off.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import Enum
from itertools import takewhile

from services.common.errors import EXIT_FAILED, EXIT_KILLED, EXIT_OK
from services.launcher.child import Child, OnLine, exit_text
from services.launcher.logs import reported_error
from services.launcher.plan import ChildSpec
from services.launcher.restart import Deaths, RestartPolicy
from services.launcher.screen import Screen
from services.launcher.settings import SERVICES

_GRACE_S = 5.0
_CULPRIT_LINES = 12


class Phase(Enum):
    """Where the whole stands."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    KILLED = "killed"


class Supervisor:
    """Runs children until it is told to stop, or one of them cannot be kept.

    What "ready" means is given to ``run`` from outside: the rules here hold for any process.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        screen: Screen,
        on_line: OnLine,
        policy: RestartPolicy | None,
        drain_timeout_s: float,
    ) -> None:
        """
        Args:
            specs: What to start.
            screen: Where people are told.
            on_line: Called with every line of a child's output.
            policy: When a dead child lives again; ``None`` = its death stops everything.
            drain_timeout_s: How long the children may take to finish their requests.
        """
        self.children = [Child(spec, on_line=on_line) for spec in specs]
        self.phase = Phase.STARTING
        self._screen = screen
        self._policy = policy
        self._drain_timeout_s = drain_timeout_s
        self._ending = asyncio.Event()
        self._patience_s = 0.0
        self._is_clean = True
        self._culprit: tuple[Child, str] | None = None

    def stop(self) -> None:
        """Drain; the second call ends every child at once."""
        if self.phase in (Phase.STARTING, Phase.READY):
            # Before it was ready nobody can have a request here that is worth waiting for.
            self._patience_s = self._drain_timeout_s if self.phase is Phase.READY else 0.0
            self._enter(Phase.DRAINING)
        else:
            self.kill()

    def kill(self) -> None:
        """End every child at once."""
        self._screen.line("stopping now")
        self._enter(Phase.KILLED)
        for child in self.children:
            child.signal(signal.SIGKILL)

    async def run(
        self,
        *,
        until_ready: Callable[[], Awaitable[None]],
        while_ready: Callable[[], Awaitable[None]],
        until_back: Callable[[Child], Awaitable[None]],
        until_drained: Callable[[float], Coroutine[None, None, None]],
    ) -> int:
        """Start the children and stay until all have ended.

        Args:
            until_ready: Returns once every child is ready.
            while_ready: Runs from then on, until the end begins.
            until_back: Returns once one child that was started again is ready.
            until_drained: Runs while the children drain, and may show how far they are; it is given
                the monotonic time until which requests may go on, and cancelled when the children
                have ended.

        Returns:
            0 after a drain, 1 if a child could not be kept, 130 if the user did not wait.
        """
        try:
            async with asyncio.TaskGroup() as lives:
                keepers = [lives.create_task(self._keep(c, until_back)) for c in self.children]
                serving = lives.create_task(self._serve(until_ready, while_ready))
                await self._ending.wait()
                serving.cancel()
                drained_by = time.monotonic() + self._patience_s
                showing = [lives.create_task(until_drained(drained_by))] if self._patience_s else []
                await self._end_all(keepers, deadline=drained_by + _GRACE_S)
                for task in showing:
                    task.cancel()
        finally:
            for child in self.children:
                child.signal(signal.SIGKILL)
        self._name_culprit()
        return self._exit_code()

    def _exit_code(self) -> int:
        if self.phase is Phase.KILLED:
            return EXIT_KILLED
        return EXIT_OK if self.phase is Phase.DRAINING and self._is_clean else EXIT_FAILED

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is not Phase.READY:
            self._ending.set()

    async def _serve(
        self, until_ready: Callable[[], Awaitable[None]], while_ready: Callable[[], Awaitable[None]]
    ) -> None:
        await until_ready()
        self._enter(Phase.READY)
        await while_ready()

    async def _keep(self, child: Child, until_back: Callable[[Child], Awaitable[None]]) -> None:
        """One child's lives, one after the other."""
        deaths = Deaths(self._policy) if self._policy is not None else None
        while True:
            await self._begin(child)
            code = await self._live(child, until_back if deaths and deaths.num_recent else None)
            if self._ending.is_set():
                return
            if self.phase is Phase.STARTING or deaths is None:
                return self._give_up(child, code)
            delay_s = deaths.record(time.monotonic())
            if delay_s is None:
                self._screen.line(f"{child.name} has died {deaths.num_recent} times in a while")
                return self._give_up(child, code)
            self._screen.line(
                f"{child.name} (pid {child.pid}) died: {exit_text(code)}; "
                f"starting it again in {delay_s:g} s"
            )
            if await self._ends_within(delay_s):
                return

    async def _begin(self, child: Child) -> None:
        await child.start()
        if self._ending.is_set():
            # The end began while the process was being made: it has not had its signal.
            child.signal(signal.SIGKILL)

    async def _live(
        self, child: Child, until_back: Callable[[Child], Awaitable[None]] | None
    ) -> int:
        """One life, and the news that it is ready where it is not the first."""
        if until_back is None:
            return await child.wait()
        async with asyncio.TaskGroup() as tasks:
            news = tasks.create_task(self._tell_back(child, until_back))
            code = await child.wait()
            news.cancel()
        return code

    async def _tell_back(
        self, child: Child, until_back: Callable[[Child], Awaitable[None]]
    ) -> None:
        await until_back(child)
        seconds = time.monotonic() - child.started_at
        self._screen.line(f"{child.name} (pid {child.pid}) is back, ready after {seconds:.1f} s")

    async def _ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        except TimeoutError:
            return False
        return True

    def _give_up(self, child: Child, code: int) -> None:
        when = " before everything was ready" if self.phase is Phase.STARTING else ""
        self._culprit = (child, f"{child.name} (pid {child.pid}) died{when}: {exit_text(code)}")
        self._screen.line(f"{self._culprit[1]}; stopping all")
        self._enter(Phase.FAILED)

    def _name_culprit(self) -> None:
        """Say at the very end, where it is seen, whose death ended everything."""
        if self._culprit is None:
            return
        child, death = self._culprit
        self._screen.line()
        lines = list(child.last_lines)[-_CULPRIT_LINES:]
        # What it said of itself at the very end says it all.
        if errors := list(takewhile(bool, map(reported_error, reversed(lines)))):
            self._screen.line(f"{death}:")
            lines = errors[::-1]
        else:
            self._screen.line(f"{death}. Its last lines:")
        for line in lines:
            self._screen.line(f"  {line}")

    async def _end_all(self, keepers: Sequence[asyncio.Task[None]], *, deadline: float) -> None:
        lives = list(zip(self.children, keepers, strict=True))
        groups = [lives]
        if self._patience_s > 0:
            groups = [[p for p in lives if p[0].spec.service == service] for service in SERVICES]
        for group in filter(None, groups):
            for child, _ in group:
                child.signal(signal.SIGTERM)
            await self._bury(group, deadline=deadline)

    async def _bury(
        self, group: Sequence[tuple[Child, asyncio.Task[None]]], *, deadline: float
    ) -> None:
        """Wait for the end of some children; at the deadline make it."""
        keepers = [keeper for _, keeper in group]
        await asyncio.wait(keepers, timeout=max(0.0, deadline - time.monotonic()))
        for child, _ in group:
            if child.is_alive and self.phase is not Phase.KILLED:
                self._is_clean = False
                self._screen.line(f"{child.name} (pid {child.pid}) does not end; killing it")
            child.signal(signal.SIGKILL)
        await asyncio.wait(keepers)
