"""``text_fp``: whether two processes mean the same by text, tokens and chat templates.

A tokenizer sends requests only to engines with its own ``text_fp``; a mismatch is refused by name
rather than answered with garbage.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from services.common.block_hash import frame
from services.common.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"


def text_fingerprint(model_dir: Path) -> str:
    """SHA-256 (hex) over tokenizer, chat template, vocabulary size and end-of-sequence ids.

    Args:
        model_dir: Directory with ``tokenizer.json`` and ``config.json``; the template is
            ``chat_template.jinja``, or else the ``chat_template`` of ``tokenizer_config.json``.

    Raises:
        ConfigError: A file is missing or is not JSON.
    """
    config = read_json(model_dir / "config.json")
    fields = (
        hashlib.sha256(_read(model_dir / TOKENIZER_FILE)).hexdigest(),
        _template_digest(model_dir),
        str(vocab_size(config)),
        ",".join(map(str, eos_token_ids(model_dir))),
    )
    return hashlib.sha256(frame(*fields)).hexdigest()


def vocab_size(config: dict[str, Any]) -> int:
    """Rows of the model's output layer, from its ``config.json``.

    Raises:
        ConfigError: It is not given.
    """
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ConfigError("config.json has no vocab_size")
    return size


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Every id that ends a sequence: of ``config.json`` and ``generation_config.json``, ascending.

    Raises:
        ConfigError: A file is not JSON.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_dir / name
        if path.exists():
            found |= _as_ids(read_json(path).get("eos_token_id"))
    return tuple(sorted(found))


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ConfigError: It cannot be read or is not an object.
    """
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _template_digest(model_dir: Path) -> str:
    path = model_dir / TEMPLATE_FILE
    if path.exists():
        return hashlib.sha256(_read(path)).hexdigest()
    settings = model_dir / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.exists() else None
    return hashlib.sha256(json.dumps(template).encode()).hexdigest() if template else ""


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
