"""Finds an implementation by its file's name: the file name is the registry."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from services.common.errors import ConfigError


def load_plugin(package: str, name: str, *, what: str) -> ModuleType:
    """Import ``<package>.<name>``.

    Args:
        package: Dotted name of the folder that holds the implementations.
        name: File name without ``.py``.
        what: What is being looked for, for the message ("attention backend").

    Raises:
        ConfigError: No such file; the message lists those that exist.
    """
    names = plugin_names(package)
    if name not in names:
        raise ConfigError(f"unknown {what} {name!r}; available: {', '.join(names) or 'none'}")
    return importlib.import_module(f"{package}.{name}")


def plugin_names(package: str) -> list[str]:
    """Names of the implementations in a folder, sorted; ``base`` and private files do not count."""
    folder = importlib.import_module(package)
    return sorted(
        module.name
        for module in pkgutil.iter_modules(folder.__path__)
        if module.name != "base" and not module.name.startswith("_")
    )
