"""Building the native library: cached, safe beside other builds, clear when it cannot be."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.worker.native import build as build_module
from services.worker.native.build import BuildError, build

TINY = 'extern "C" __attribute__((visibility("default"))) int level() { return SL_LEVEL; }\n'


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that compiles in no time."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(build_module, "SOURCES", folder)
    return folder


def fake_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_what_is_built_is_found_again(tmp_path: Path) -> None:
    library = build(0, cache_dir=tmp_path / "cache")
    stamp = library.stat().st_mtime_ns
    assert build(0, cache_dir=tmp_path / "cache") == library
    assert library.stat().st_mtime_ns == stamp


def test_other_sources_levels_and_compilers_make_another_library(
    tmp_path: Path, sources: Path
) -> None:
    cache = tmp_path / "cache"
    real = build_module.find_compiler()
    paths = {build(0, cache_dir=cache), build(1, cache_dir=cache)}
    wrapper = fake_compiler(tmp_path / "other++", f'exec {real} "$@"')
    paths.add(build(0, cache_dir=cache, compilers=(wrapper,)))
    (sources / "tiny.h").write_text("// one more\n")
    paths.add(build(0, cache_dir=cache))
    assert len(paths) == 4
    assert all(path.exists() for path in paths)


def test_builds_at_once_give_one_library_and_leave_nothing_behind(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(lambda _: build(0, cache_dir=cache), range(4)))
    assert len(built) == 1
    assert os.listdir(cache) == [built.pop().name]


def test_no_compiler_is_told(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler .*no-such-c\+\+"):
        build(0, cache_dir=tmp_path / "cache", compilers=("no-such-c++",))


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = fake_compiler(tmp_path / "broken++", "echo cannot find the moon; exit 3")
    with pytest.raises(BuildError, match="cannot find the moon"):
        build(0, cache_dir=tmp_path / "cache", compilers=(broken,))
    assert os.listdir(tmp_path / "cache") == []


def test_what_a_killed_build_left_is_removed_by_a_later_one_but_not_what_may_still_run(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    killed, running = cache / ".sluiceway-avx512-12ab-x", cache / ".sluiceway-y"
    for folder in (killed, running):
        folder.mkdir(parents=True)
        (folder / "tiny.o").write_bytes(b"half")
    long_ago = time.time() - 3601
    os.utime(killed, (long_ago, long_ago))
    library = build(0, cache_dir=cache)
    assert set(os.listdir(cache)) == {library.name, running.name}


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot write"):
        build(0, cache_dir=tmp_path / "file" / "cache")
