"""Instruction set levels of the native library, and which of them this machine has. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

IsaName = Literal["baseline", "avx2", "avx512", "avx512_bf16", "amx"]
IsaSetting = Literal["auto", "off", "baseline", "avx2", "avx512", "avx512_bf16", "amx"]


@dataclass(frozen=True, slots=True)
class Isa:
    """One level; each holds all of the levels before it.

    Attributes:
        name: What the setting ``cpu_isa`` calls it.
        cpu_flags: Names that /proc/cpuinfo must list beyond those of the level before.
        compiler_flags: What the compiler is told, likewise.
    """

    name: IsaName
    cpu_flags: tuple[str, ...]
    compiler_flags: tuple[str, ...]


LEVELS = (
    Isa("baseline", (), ()),
    Isa("avx2", ("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c")),
    Isa(
        "avx512",
        ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
    ),
    Isa("avx512_bf16", ("avx512_bf16", "avx512_vnni"), ("-mavx512bf16", "-mavx512vnni")),
    Isa("amx", ("amx_tile", "amx_bf16", "amx_int8"), ("-mamx-tile", "-mamx-bf16", "-mamx-int8")),
)
"""Lowest first. ``baseline`` is whatever the compiler makes for the architecture by default."""


def level_of(name: IsaName) -> int:
    """Its index in ``LEVELS``, which is ``SL_LEVEL`` in the sources."""
    return next(i for i, isa in enumerate(LEVELS) if isa.name == name)


def compiler_flags(level: int) -> tuple[str, ...]:
    """What the compiler is told to make code for a level."""
    flags = [flag for isa in LEVELS[: level + 1] for flag in isa.compiler_flags]
    return (*flags, f"-DSL_LEVEL={level}")


def best_level(cpu_flags: frozenset[str]) -> int:
    """The highest level that a processor with these flags has, all levels below it included."""
    level = 0
    for isa in LEVELS[1:]:
        if not cpu_flags.issuperset(isa.cpu_flags):
            break
        level += 1
    return level


def lacking(cpu_flags: frozenset[str], level: int) -> list[str]:
    """Flags of the levels above ``level`` that a processor lacks."""
    wanted = [flag for isa in LEVELS[level + 1 :] for flag in isa.cpu_flags]
    return [flag for flag in wanted if flag not in cpu_flags]


@cache
def machine_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the kernel says that the processor can do; empty where it does not say (no x86 Linux).

    The kernel leaves out what it does not support itself, and names what a virtual machine passes
    on.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")),
        frozenset(),
    )
