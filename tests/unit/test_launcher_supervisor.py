"""The rules of the supervisor, with small processes in place of the services."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from services.launcher.child import Child
from services.launcher.plan import ChildSpec
from services.launcher.restart import RestartPolicy
from services.launcher.screen import Screen
from services.launcher.supervisor import Phase, Supervisor

OBEDIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
print("up", flush=True)
while True: time.sleep(0.05)
"""
DEAF = OBEDIENT.replace('(print("drained", flush=True), sys.exit(0))', "None")
DIES = "print('about to fail'); print('cause: no such file'); raise SystemExit(3)"
QUICK = RestartPolicy(first_delay_s=0.02, max_deaths=3, window_s=60.0)


class Stage:
    """A supervisor with children, and what its user saw."""

    def __init__(self, programs: dict[str, str], *, policy: RestartPolicy | None = QUICK) -> None:
        self.out = io.StringIO()
        self.lines: list[tuple[str, str]] = []
        self.drain_s = 0.0
        specs = [
            ChildSpec(name, name, (sys.executable, "-S", "-c", program), {}, "")
            for name, program in programs.items()
        ]
        self.supervisor = Supervisor(
            specs,
            screen=Screen(self.out, is_terminal=False),
            on_line=self._take,
            policy=policy,
            drain_timeout_s=30.0,
        )

    def _take(self, child: Child, line: str) -> None:
        self.lines.append((child.name, line))

    def child(self, name: str) -> Child:
        return next(child for child in self.supervisor.children if child.name == name)

    async def until(self, fact: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not fact():
                await asyncio.sleep(0.01)

    async def until_up(self, name: str, *, times: int = 1) -> None:
        await self.until(lambda: self.lines.count((name, "up")) == times)

    async def run(self) -> int:
        async def ready() -> None:
            for child in self.supervisor.children:
                await self.until_up(child.name)

        async def forever() -> None:
            await asyncio.Event().wait()

        async def back(child: Child) -> None:
            await self.until(lambda: child.is_alive)

        async def drained(drained_by: float) -> None:
            self.drain_s = drained_by - time.monotonic()

        return await self.supervisor.run(
            until_ready=ready,
            while_ready=forever,
            until_back=back,
            until_drained=drained,
        )


async def test_a_child_that_dies_before_ready_stops_all_and_is_named_with_its_last_lines() -> None:
    stage = Stage({"gateway": OBEDIENT, "worker": DIES})
    assert await stage.run() == 1
    text = stage.out.getvalue()
    assert "worker" in text and "died before everything was ready: exit code 3" in text
    assert "cause: no such file" in text
    assert not any(child.is_alive for child in stage.supervisor.children)


async def test_a_child_that_said_why_it_ends_is_named_with_that_alone() -> None:
    said = {"event": "service_failed", "level": "error", "error": "ConfigError: no such model"}
    program = f"print('starting'); print({json.dumps(json.dumps(said))}); raise SystemExit(2)"
    stage = Stage({"worker": program})
    assert await stage.run() == 1
    last = stage.out.getvalue().splitlines()[-2:]
    assert last[0].endswith("died before everything was ready: exit code 2:")
    assert last[1] == "  no such model"


async def test_a_child_that_went_on_after_its_error_is_named_with_its_last_lines() -> None:
    said = {"event": "service_failed", "level": "error", "error": "ConfigError: no such model"}
    program = f"print({json.dumps(json.dumps(said))}); print('a crash'); raise SystemExit(3)"
    stage = Stage({"worker": program})
    assert await stage.run() == 1
    assert stage.out.getvalue().splitlines()[-1] == "  a crash"


async def test_a_child_that_dies_after_ready_is_started_again_and_the_others_stay_up() -> None:
    stage = Stage({"gateway": OBEDIENT, "worker": OBEDIENT})
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(stage.run())
        await stage.until(lambda: stage.supervisor.phase is Phase.READY)
        pids = {name: stage.child(name).pid for name in ("gateway", "worker")}
        os.kill(pids["worker"], signal.SIGKILL)
        await stage.until_up("worker", times=2)
        assert stage.child("gateway").pid == pids["gateway"]
        assert stage.child("worker").pid != pids["worker"]
        stage.supervisor.stop()
    assert run.result() == 0
    text = stage.out.getvalue()
    assert "killed by SIGKILL; starting it again" in text
    assert "is back" in text


async def test_a_child_that_dies_too_often_stops_all() -> None:
    stage = Stage({"gateway": OBEDIENT, "worker": OBEDIENT})
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(stage.run())
        await stage.until(lambda: stage.supervisor.phase is Phase.READY)
        for life in range(1, 4):
            await stage.until_up("worker", times=life)
            os.kill(stage.child("worker").pid, signal.SIGKILL)
    assert run.result() == 1
    assert "worker has died 3 times" in stage.out.getvalue()


async def test_without_restarts_the_first_death_stops_all() -> None:
    stage = Stage({"gateway": OBEDIENT, "worker": OBEDIENT}, policy=None)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(stage.run())
        await stage.until(lambda: stage.supervisor.phase is Phase.READY)
        os.kill(stage.child("worker").pid, signal.SIGKILL)
    assert run.result() == 1


async def test_a_stop_drains_from_the_gateway_inwards() -> None:
    names = ["kvstore", "worker", "scheduler", "tokenizer", "gateway"]
    stage = Stage(dict.fromkeys(names, OBEDIENT))
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(stage.run())
        await stage.until(lambda: stage.supervisor.phase is Phase.READY)
        stage.supervisor.stop()
    assert run.result() == 0
    drained = [name for name, line in stage.lines if line == "drained"]
    assert drained == ["gateway", "tokenizer", "scheduler", "worker", "kvstore"]


async def test_a_drain_is_shown_to_last_as_long_as_was_set_and_no_longer() -> None:
    stage = Stage({"gateway": OBEDIENT})
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(stage.run())
        await stage.until(lambda: stage.supervisor.phase is Phase.READY)
        stage.supervisor.stop()
    assert run.result() == 0
    assert 20.0 < stage.drain_s <= 30.0


async def test_a_second_stop_kills_children_that_take_their_time() -> None:
    stage = Stage({"gateway": DEAF, "worker": DEAF})
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(stage.run())
        await stage.until(lambda: stage.supervisor.phase is Phase.READY)
        stage.supervisor.stop()
        await asyncio.sleep(0)
        stage.supervisor.stop()
    assert run.result() == 130
    assert time.monotonic() - began < 20
    assert not any(child.is_alive for child in stage.supervisor.children)


async def test_a_stop_while_a_child_waits_for_its_next_life_does_not_start_it() -> None:
    slow = RestartPolicy(first_delay_s=60.0)
    stage = Stage({"gateway": OBEDIENT, "worker": OBEDIENT}, policy=slow)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(stage.run())
        await stage.until(lambda: stage.supervisor.phase is Phase.READY)
        os.kill(stage.child("worker").pid, signal.SIGKILL)
        await stage.until(lambda: "starting it again" in stage.out.getvalue())
        stage.supervisor.stop()
    assert run.result() == 0
    assert stage.lines.count(("worker", "up")) == 1


@pytest.mark.parametrize("size", [10, 3_000_000])
async def test_lines_of_any_length_are_read(size: int) -> None:
    lines: list[str] = []
    program = f"print('x' * {size}); print('end')"
    spec = ChildSpec("worker", "worker", (sys.executable, "-S", "-c", program), {}, "")
    child = Child(spec, on_line=lambda _, line: lines.append(line))
    await child.start()
    assert await child.wait() == 0
    assert lines[-1] == "end"
    assert sum(map(len, lines)) == size + 3


async def test_what_a_child_has_started_ends_with_it() -> None:
    program = (
        "import subprocess, sys; "
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(other.pid)"
    )
    spec = ChildSpec("worker", "worker", (sys.executable, "-S", "-c", program), {}, "")
    child = Child(spec, on_line=lambda _child, _line: None)
    await child.start()
    async with asyncio.timeout(30):
        assert await child.wait() == 0
        # It has been sent a signal by now, which a busy machine is not done with at once.
        while _runs(int(child.last_lines[0])):
            await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
