"""The loaded library: every level that this machine has, its threads, and life without it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from services.worker.native import library as library_module
from services.worker.native.build import BuildError
from services.worker.native.isa import LEVELS, IsaName, best_level, machine_flags
from services.worker.native.library import Library, load_library, usable_cores

LEVELS_HERE = [isa.name for isa in LEVELS[: best_level(machine_flags()) + 1]]


Work = ctypes.CFUNCTYPE(None, ctypes.c_int64)
After = ctypes.CFUNCTYPE(None)


@pytest.fixture(params=LEVELS_HERE)
def library(request: pytest.FixtureRequest) -> Library:
    loaded = load_library(request.param)
    assert loaded is not None
    return loaded


def count_tiles(
    library: Library,
    counts: np.ndarray,
    *,
    may_run_twice: bool = False,
    work: Callable[[int], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    function = library.function(
        "sl_count_tiles", [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, Work, After]
    )
    function(
        counts.ctypes.data,
        counts.size,
        may_run_twice,
        Work() if work is None else Work(work),
        After() if after is None else After(after),
    )


def test_a_level_can_be_forced(library: Library) -> None:
    assert load_library(library.isa) is library
    assert library.num_threads == usable_cores()


@pytest.mark.parametrize("may_run_twice", [False, True])
def test_every_tile_counts_exactly_once(library: Library, may_run_twice: bool) -> None:
    for num_tiles in (0, 1, 2, 3, 17, 1000):
        counts = np.zeros(num_tiles, dtype=np.int32)
        for _ in range(200):
            count_tiles(library, counts, may_run_twice=may_run_twice)
        assert (counts == 200).all()


@pytest.mark.parametrize("may_run_twice", [False, True])
@pytest.mark.skipif(usable_cores() < 2, reason="needs two threads")
def test_a_tile_that_is_held_up_is_taken_over_if_it_may_run_twice(
    library: Library, may_run_twice: bool
) -> None:
    runs: list[int] = []
    others_went_on = threading.Event()
    did_they: list[bool] = []
    counts = np.zeros(20, dtype=np.int32)

    def work(tile: int) -> None:
        runs.append(tile)
        if tile == 3 and runs.count(tile) == 1:
            did_they.append(others_went_on.wait(60.0 if may_run_twice else 0.3))

    count_tiles(library, counts, may_run_twice=may_run_twice, work=work, after=others_went_on.set)
    assert did_they == [may_run_twice]
    assert runs.count(3) == (2 if may_run_twice else 1)
    assert (counts == 1).all()


def test_regions_of_several_callers_do_not_mix(library: Library) -> None:
    counts = [np.zeros(97, dtype=np.int32) for _ in range(4)]

    def call(mine: np.ndarray) -> None:
        for _ in range(500):
            count_tiles(library, mine, may_run_twice=True)

    threads = [threading.Thread(target=call, args=(mine,)) for mine in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((mine == 500).all() for mine in counts)


def unload(monkeypatch: pytest.MonkeyPatch, *, error: Exception, at: tuple[IsaName, ...]) -> None:
    """Let building the levels ``at`` fail."""
    real = library_module.build

    def build(level: int, *, cache_dir: Path) -> Path:
        if LEVELS[level].name in at:
            raise error
        return real(level, cache_dir=cache_dir)

    monkeypatch.setattr(library_module, "build", build)
    # Past the cache: what was loaded before must not be found.
    monkeypatch.setattr(library_module, "load_library", load_library.__wrapped__)


def test_without_a_compiler_there_is_no_library_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unload(monkeypatch, error=BuildError("no C++ compiler"), at=tuple(i.name for i in LEVELS))
    with capture_logs() as logs:
        assert library_module.load_library() is None
    (line,) = logs
    assert line["log_level"] == "warning"
    assert line["reason"] == "no C++ compiler"


@pytest.mark.skipif(len(LEVELS_HERE) < 2, reason="needs two levels")
def test_a_level_that_is_refused_is_left_for_the_next_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unload(monkeypatch, error=OSError("refused"), at=(LEVELS_HERE[-1],))
    with capture_logs() as logs:
        loaded = library_module.load_library()
    assert loaded is not None
    assert loaded.isa == LEVELS_HERE[-2]
    assert logs[0]["event"] == "native_level_unavailable"


def test_it_can_be_switched_off() -> None:
    assert load_library("off") is None


def test_cores_are_limited_by_the_control_group(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == usable_cores(tmp_path / "absent")
