"""The safetensors files of a model directory: which tensor is where, read through a memory map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import ConfigError
from services.common.fingerprint import read_json

_INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a model, by name.

    Args:
        files: Each file's tensor names.
    """

    def __init__(self, files: Mapping[Path, list[str]]) -> None:
        self._files = dict(files)

    @classmethod
    def open(cls, model_dir: Path) -> Checkpoint:
        """Find the files and read their headers.

        Raises:
            ConfigError: There are none, one is damaged, or a shard lacks what the index promises.
        """
        checkpoint = cls({path: _tensor_names(path) for path in _weight_files(model_dir)})
        checkpoint._check_unique()
        return checkpoint

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return {name for names in self._files.values() for name in names}

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self._files)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor, which stands for all where config.json names none.

        Raises:
            ConfigError: There are no tensors.
        """
        for _, tensor in self.tensors():
            return tensor.dtype
        raise ConfigError(f"no tensors in {', '.join(map(str, self._files))}")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, file by file. Each is a view of mapped memory: copy it, do not keep it.

        Raises:
            ConfigError: A file has become unreadable.
        """
        for path, names in self._files.items():
            with _opened(path) as file:
                for name in names:
                    yield name, file.get_tensor(name)

    def _check_unique(self) -> None:
        home: dict[str, Path] = {}
        for path, names in self._files.items():
            for name in names:
                if name in home:
                    raise ConfigError(
                        f"tensor {name!r} is in both {home[name].name} and {path.name}"
                    )
                home[name] = path


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX_FILE
    if index.exists():
        return _indexed_files(index)
    single = model_dir / "model.safetensors"
    files = [single] if single.exists() else sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"no *.safetensors in {model_dir}; other weight formats are not supported"
        )
    return files


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    for path in files:
        if not path.exists():
            raise ConfigError(f"{index.name} names {path.name}, which is not in {index.parent}")
    return files


def _tensor_names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc
