"""Reads a Hugging Face config.json key by key, so that what nobody read can be named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from services.common.errors import ConfigError
from services.common.fingerprint import read_json


class HfConfig:
    """The keys of one JSON object, typed on reading.

    Args:
        values: The object.
        where: File (and key) for messages.
    """

    def __init__(self, values: Mapping[str, object], *, where: str) -> None:
        self._values = dict(values)
        self._where = where
        self._unread = set(self._values)

    @classmethod
    def load(cls, path: Path) -> HfConfig:
        """Read a file.

        Raises:
            ConfigError: It is missing or holds no JSON object.
        """
        return cls(read_json(path), where=path.name)

    @property
    def unread(self) -> list[str]:
        """Keys that nobody asked for, sorted."""
        return sorted(self._unread)

    def get(self, key: str) -> object:
        """The value as it is; ``None`` where the key is absent."""
        self._unread.discard(key)
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._values

    def optional_integer(self, key: str) -> int | None:
        """An integer, or ``None`` where the key is absent or null."""
        return None if self.get(key) is None else self.integer(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; absent or null gives the default, or an error where there is none."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; absent or null gives the default, or an error where there is none."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false; absent or null gives the default."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; absent or null gives the default, or an error where there is none."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of strings, or ``None`` where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return list(value)

    def section(self, key: str) -> HfConfig | None:
        """A nested object, or ``None`` where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return HfConfig(value, where=f"{self._where}: {key}")

    def wrong(self, key: str, wanted: str) -> ConfigError:
        """The error for a value that cannot be used."""
        return ConfigError(f"{self._where}: {key} = {self._values.get(key)!r}, must be {wanted}")
