"""Implementations are found by their file's name."""

from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.common.plugins import load_plugin, plugin_names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "plugin_folder"
    folder.mkdir()
    for name in ("__init__", "base", "_shared", "one", "two"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "plugin_folder"


def test_a_file_is_found_by_its_name(package: str) -> None:
    assert load_plugin(package, "one", what="thing").NAME == "one"


def test_a_miss_lists_what_exists(package: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown thing 'three'; available: one, two"):
        load_plugin(package, "three", what="thing")


def test_base_and_private_files_are_no_plugins(package: str) -> None:
    assert plugin_names(package) == ["one", "two"]
