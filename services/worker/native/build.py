"""Builds the native library for one instruction set level with the machine's C++ compiler.

The result lies in the user's cache directory under a name that holds a digest of the sources, the
compiler and the flags: what is there is right, and nothing is ever overwritten. Several processes
may build at once; each renames its own file into place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from services.common.telemetry import get_logger
from services.worker.native.isa import LEVELS, compiler_flags

log = get_logger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall")
TIMEOUT_S = 600.0
STALE_AFTER_S = 3600.0
"""Longer than any build lasts."""
_WORK_PREFIX = ".sluiceway-"


class BuildError(Exception):
    """The library could not be built; the message says what is lacking."""


def build(level: int, *, cache_dir: Path, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """Build the library of a level unless it is there.

    Args:
        level: Index in ``isa.LEVELS``.
        cache_dir: Where libraries are kept; made if need be.
        compilers: Names to look for on the path, the first found is used.

    Returns:
        Path of the shared library.

    Raises:
        BuildError: No compiler, or it failed.
    """
    compiler = find_compiler(compilers)
    flags = (*FLAGS, *compiler_flags(level))
    name = f"sluiceway-{LEVELS[level].name}-{_digest(compiler, flags)}.so"
    library = cache_dir / name
    if library.exists():
        return library
    started = time.monotonic()
    log.info("native_library_building", isa=LEVELS[level].name, compiler=compiler)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache_dir)
        _compile(compiler, flags, library)
    except OSError as exc:
        raise BuildError(f"cannot write to {cache_dir}: {exc}") from exc
    took_s = round(time.monotonic() - started, 1)
    log.info("native_library_built", path=str(library), took_s=took_s)
    return library


def find_compiler(names: tuple[str, ...] = COMPILERS) -> str:
    """Path of the C++ compiler.

    Raises:
        BuildError: There is none.
    """
    for name in names:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler on the path (looked for {', '.join(names)})")


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, platform.machine(), _version(compiler))).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> tuple[str, int, int]:
    """What tells one compiler from another without running it."""
    real = os.path.realpath(compiler)
    stat = os.stat(real)
    return real, stat.st_size, stat.st_mtime_ns


def _remove_stale(cache_dir: Path) -> None:
    """Remove the folders of builds that were killed."""
    for folder in cache_dir.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another build was quicker
            if time.time() - folder.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    """Compile every source, several at a time, and link them under the final name."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=_WORK_PREFIX) as work:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(work, f"{source.stem}.o") for source in sources]
        compile_flags = [flag for flag in flags if flag != "-shared"]
        running = [
            _start([compiler, *compile_flags, "-c", str(source), "-o", str(target)])
            for source, target in zip(sources, objects, strict=True)
        ]
        outputs = [_finish(process) for process in running]
        for output in outputs:
            _require(output)
        made = Path(work, library.name)
        _require(_finish(_start([compiler, *flags, *map(str, objects), "-o", str(made)])))
        made.rename(library)


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output


def _require(result: tuple[int, str]) -> None:
    code, output = result
    if code != 0:
        raise BuildError(f"the C++ compiler failed: {output[-2000:].strip() or code}")
