"""Models come out right where torch and oneDNN may not use what the processor has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = "tests/unit/worker/models/test_families_equal_transformers.py"
TIMEOUT_S = 900


@pytest.mark.slow
@pytest.mark.parametrize(
    ("onednn", "aten"), [("SSE41", "default"), ("AVX2", "avx2"), ("AVX512_CORE", "avx512")]
)
def test_families_equal_transformers_with_less_than_the_processor_has(
    onednn: str, aten: str
) -> None:
    forced = [f"ONEDNN_MAX_CPU_ISA={onednn}", f"ATEN_CPU_CAPABILITY={aten}"]
    done = subprocess.run(
        [
            "env",
            *forced,
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            SUITE,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
