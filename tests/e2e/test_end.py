"""How ``sluiceway serve`` ends: by its user, by a child, by the kernel."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.system import DONE, START_TIMEOUT_S, System

LONG: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "temperature": 0}
ENDLESS: dict[str, Any] = {"max_tokens": 3500, "ignore_eos": True, "temperature": 0}


def until_ended(pids: list[int], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if runs(pid)]
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stream_to_the_end(system: System, fields: dict[str, Any]) -> list[dict[str, Any]]:
    with system.stream("Count.", **fields) as events:
        return list(events)


def test_ctrl_c_drains_with_a_countdown_and_exits_with_0(serve: Callable[..., System]) -> None:
    system = serve().until_ready()
    pids = list(system.pids().values())
    with ThreadPoolExecutor(1) as pool:
        in_flight = pool.submit(stream_to_the_end, system, LONG)
        system.until(lambda: system.stats().num_requests > 0, timeout_s=30, what="a request")
        system.interrupt()
        assert in_flight.result(timeout=120)[-1] is DONE
    assert system.launcher.wait(timeout=60) == 0
    assert "draining: 1 request left" in system.output
    until_ended(pids, timeout_s=1)


def test_a_second_ctrl_c_kills(serve: Callable[..., System]) -> None:
    system = serve().until_ready()
    pids = list(system.pids().values())
    with ThreadPoolExecutor(1) as pool:
        in_flight = pool.submit(stream_to_the_end, system, ENDLESS)
        system.until(lambda: system.stats().num_requests > 0, timeout_s=30, what="a request")
        system.interrupt()
        system.until(lambda: "draining" in system.output, timeout_s=10, what="the countdown")
        began = time.monotonic()
        system.interrupt()
        assert system.launcher.wait(timeout=30) == 130
        assert time.monotonic() - began < 5
        assert in_flight.exception(timeout=30) is not None or in_flight.result()[-1] is not DONE
    until_ended(pids, timeout_s=1)


def test_ctrl_c_before_ready_ends_everything(serve: Callable[..., System]) -> None:
    system = serve()
    system.until(lambda: len(system.pids()) == 5, timeout_s=START_TIMEOUT_S, what="the children")
    pids = list(system.pids().values())
    system.interrupt()
    system.launcher.wait(timeout=30)
    until_ended(pids, timeout_s=1)


def test_kill_9_of_the_launcher_ends_the_children(serve: Callable[..., System]) -> None:
    system = serve().until_ready()
    pids = list(system.pids().values())
    assert len(pids) == 5
    system.launcher.send_signal(signal.SIGKILL)
    system.launcher.wait()
    until_ended(pids, timeout_s=5)


def test_a_child_that_dies_before_ready_is_named_with_its_last_lines(
    serve: Callable[..., System], tiny_chat_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_chat_dir, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "no_such_family"}))
    system = serve(model_dir=broken)
    assert system.launcher.wait(timeout=START_TIMEOUT_S) == 1
    end = system.output.splitlines()[-20:]
    assert any("worker" in line and "died before everything was ready" in line for line in end)
    assert any("no_such_family" in line for line in end)
    assert system.pids() == {}


def test_two_workers_are_two_engines(serve: Callable[..., System]) -> None:
    system = serve("--workers", "2").until_ready()
    assert len(system.stats().engines) == 2
    assert system.chat().status_code == 200
    assert "worker-1" in system.output and "worker-2" in system.output
