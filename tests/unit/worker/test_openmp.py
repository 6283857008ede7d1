"""OpenMP's threads wait as the worker's settings say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.common.config import child_environment
from services.common.errors import InvariantError
from services.worker.openmp import limit_spinning

SOURCE = """
import sys
from services.worker.__main__ import limit_spinning
assert "torch" not in sys.modules
limit_spinning(1234)
import torch
"""


def shown_by_openmp(**environment: str) -> str:
    """What libgomp prints of its settings as it is loaded."""
    return subprocess.run(
        [sys.executable, "-c", SOURCE],
        check=True,
        capture_output=True,
        text=True,
        env=child_environment({"OMP_DISPLAY_ENV": "VERBOSE", **environment}),
    ).stderr


def test_openmp_is_told_how_long_to_spin_before_torch_is_loaded() -> None:
    assert "GOMP_SPINCOUNT = '1234'" in shown_by_openmp()


def test_what_the_user_has_set_stays() -> None:
    assert "GOMP_SPINCOUNT = '77'" in shown_by_openmp(GOMP_SPINCOUNT="77")


def test_it_is_an_error_once_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    with pytest.raises(InvariantError):
        limit_spinning(1)
