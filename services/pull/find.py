"""Where a model lies that nothing has to be done for."""

from __future__ import annotations

from pathlib import Path

from services.common.config import user_cache_dir

PACKAGED_MODEL = "smollm2"


def find_model(name: str) -> Path | None:
    """The directory of a model that is on this disk already.

    Args:
        name: As ``ensure_model``.

    Returns:
        ``None`` if it must be fetched, if only the hub's cache could tell, or if the directory is
        not one that a worker can load: ``ensure_model`` says why.
    """
    directory = packaged_dir(user_cache_dir()) if name == PACKAGED_MODEL else Path(name)
    directory = directory.expanduser()
    return directory if is_model(directory) else None


def packaged_dir(cache_dir: Path) -> Path:
    """Where the packaged model is put; it is complete if it is there."""
    return cache_dir / "models" / PACKAGED_MODEL


def is_model(directory: Path) -> bool:
    """Whether a worker may be able to load what lies there."""
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
