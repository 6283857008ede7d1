"""Which level a processor has, by its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.native.isa import (
    LEVELS,
    IsaName,
    best_level,
    compiler_flags,
    lacking,
    level_of,
    machine_flags,
)


def flags_of(name: IsaName) -> frozenset[str]:
    """What a processor that has exactly the levels up to ``name`` says of itself."""
    return frozenset(flag for isa in LEVELS[: level_of(name) + 1] for flag in isa.cpu_flags)


@pytest.mark.parametrize("name", [isa.name for isa in LEVELS])
def test_a_processor_has_the_level_whose_flags_it_lists(name: IsaName) -> None:
    assert best_level(flags_of(name)) == level_of(name)
    assert best_level(flags_of(name) | {"sse2", "amx_complex"}) == level_of(name)


def test_a_gap_ends_the_levels() -> None:
    assert best_level(flags_of("amx") - {"avx512_bf16"}) == level_of("avx512")
    assert lacking(flags_of("amx") - {"avx512_bf16"}, level_of("avx512")) == ["avx512_bf16"]


def test_nothing_known_is_the_baseline() -> None:
    assert best_level(frozenset()) == 0
    assert compiler_flags(0) == ("-DSL_LEVEL=0",)


def test_a_level_is_compiled_with_the_flags_of_all_below_it() -> None:
    assert set(compiler_flags(1)[:-1]) < set(compiler_flags(2)[:-1]) < set(compiler_flags(4)[:-1])


def test_flags_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma f16c\n\nprocessor\t: 1\n")
    assert machine_flags(cpuinfo) == {"fpu", "avx2", "fma", "f16c"}
    assert machine_flags(tmp_path / "absent") == frozenset()
