"""Loads the native library and types its functions.

Calls go through ctypes, which lets go of the GIL; what a call costs is its arguments (about 1 µs
with few), so functions that run often take one pointer to a structure that was filled before.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from services.common.config import user_cache_dir
from services.common.telemetry import get_logger
from services.worker.native.build import BuildError, build
from services.worker.native.isa import (
    LEVELS,
    IsaName,
    IsaSetting,
    best_level,
    lacking,
    level_of,
    machine_flags,
)

log = get_logger(__name__)


class Library:
    """The native library of one level, loaded and with its threads running.

    Attributes:
        isa: Name of the level.
        num_threads: Threads that share its work, the caller included.
    """

    def __init__(self, path: Path, *, isa: IsaName, num_threads: int) -> None:
        """
        Raises:
            OSError: The library cannot be loaded, or the kernel refuses what the level needs.
        """
        self._library = ctypes.CDLL(str(path))
        self.isa = isa
        if not self.function("sl_start", [ctypes.c_int], ctypes.c_int)(num_threads):
            raise OSError(f"the kernel does not let this process use {isa}")
        self.num_threads: int = self.function("sl_num_threads", [], ctypes.c_int)()

    def function(self, name: str, arguments: Sequence[Any], result: Any = None) -> Any:
        """A function of the library that checks its arguments' types.

        Args:
            name: Of the exported symbol.
            arguments: ctypes type of each argument.
            result: ctypes type of the result; ``None`` = nothing.
        """
        found = self._library[name]
        found.argtypes = list(arguments)
        found.restype = result
        return found


@cache
def load_library(
    setting: IsaSetting = "auto", *, num_threads: int | None = None, cache_dir: Path | None = None
) -> Library | None:
    """Build the library if need be and load it, once for each set of arguments.

    A level that the kernel refuses is left for the next lower one. Where nothing can be built, a
    warning says what is lacking, and the torch reference is what runs.

    Args:
        setting: Highest level to use; "auto" = the machine's best, "off" = no native library.
        num_threads: Threads that share the work; default: one per usable core.
        cache_dir: Where built libraries are kept; default: the user's cache directory.

    Returns:
        The library, or ``None`` without one.
    """
    if setting == "off":
        log.info("native_library_off", reason="cpu_isa=off")
        return None
    flags = machine_flags()
    level = best_level(flags)
    if setting != "auto":
        level = min(level, level_of(setting))
    for candidate in range(level, -1, -1):
        isa = LEVELS[candidate].name
        try:
            path = build(candidate, cache_dir=cache_dir or user_cache_dir() / "native")
            library = Library(path, isa=isa, num_threads=num_threads or usable_cores())
        except BuildError as exc:
            log.warning("native_library_unavailable", reason=str(exc), effect="torch computes all")
            return None
        except OSError as exc:
            log.warning("native_level_unavailable", isa=isa, reason=str(exc))
            continue
        log.info(
            "native_library_loaded",
            isa=isa,
            num_threads=library.num_threads,
            processor_lacks=lacking(flags, candidate),
        )
        return library
    return None


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: by affinity, and by its control group's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
    except OSError:
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))
