"""What the launcher does, and does not do, before it starts the children."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.launcher.pull import Pull
from services.launcher.screen import Screen
from services.pull.find import find_model


def _model_dir(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def _screen() -> Screen:
    return Screen(io.StringIO(), is_terminal=False)


async def test_a_model_that_is_there_is_not_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packaged = _model_dir(tmp_path / "sluiceway" / "models" / "smollm2")
    own = _model_dir(tmp_path / "own")
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # a child could not be started
    assert await Pull("smollm2", screen=_screen()).run() == str(packaged)
    assert await Pull(str(own), screen=_screen()).run() == str(own)


async def test_a_directory_without_weights_is_explained_by_the_pull(tmp_path: Path) -> None:
    directory = _model_dir(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    assert find_model(str(directory)) is None
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        await Pull(str(directory), screen=_screen()).run()


def test_what_is_imported_before_the_children_start_is_little() -> None:
    source = "import sys; import services.launcher.serve; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True
    ).stdout.split()
    heavy = {"grpc", "httpx", "structlog", "prometheus_client", "uvloop", "torch", "numpy"}
    assert not heavy & set(loaded)
