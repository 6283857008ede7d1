"""Resolved settings as TOML, each value with its origin; the output can serve as a config file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from services.common.config import Loaded
from services.launcher.settings import Settings

_HIDDEN = "***"


def config_lines(settings: Settings) -> Iterator[str]:
    """A table per service, ``name = value  # origin`` a line; what is not set is commented out."""
    yield from _section("serve", settings.serve)
    for service, loaded in settings.services.items():
        yield ""
        yield from _section(service, loaded)


def _section(name: str, loaded: Loaded[Any]) -> Iterator[str]:
    config: BaseModel = loaded.config
    yield f"[{name}]"
    for field, info in type(config).model_fields.items():
        value = getattr(config, field)
        origin = loaded.origins[field]
        if value is None or (not info.repr and value):
            yield f"# {field} = {'(not set)' if value is None else _HIDDEN}  # {origin}"
        else:
            yield f"{field} = {_toml(value)}  # {origin}"


def _toml(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(str(value), ensure_ascii=False)
