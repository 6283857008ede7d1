"""Settings: defaults < TOML file < environment < flags, each value with where it came from.

One frozen pydantic model per service. The flag of a field is its name with dashes, its environment
variable ``SLUICEWAY_<SERVICE>__<FIELD>``, its TOML key ``[<service>] <field>``. Unknown keys are
errors everywhere. This is the only module that reads the environment.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from services.common.errors import ConfigError

ENV_PREFIX = "SLUICEWAY_"
CONFIG_FILE_ENV = "SLUICEWAY_CONFIG"
SECTIONS = ("gateway", "tokenizer", "scheduler", "worker", "kvstore", "serve", "chat")


class ServiceConfig(BaseModel):
    """What every service can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 = any free one.")
    http_port: int = Field(
        0, ge=0, le=65535, description="Port of /metrics over HTTP; 0 = any free one."
    )
    cluster_token: str | None = Field(
        None,
        description="Secret that every gRPC link carries; needed to listen beyond loopback.",
        repr=False,
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe event that is logged."
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="How log lines look: for people or for machines."
    )
    drain_timeout_s: float = Field(
        60.0, ge=0, description="How long a stopping service lets its requests finish, in seconds."
    )
    parent_pid: int | None = Field(
        None, description="Process without which this one ends at once; the launcher's."
    )


C = TypeVar("C", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A config and, per field, where its value came from."""

    config: C
    origins: Mapping[str, str]


def load_config(cls: type[C], *, section: str, argv: Sequence[str] | None = None) -> Loaded[C]:
    """Resolve one service's settings.

    Args:
        cls: The service's config model.
        section: Its name in TOML and in the environment.
        argv: Flags; ``None`` = those of this process.

    Raises:
        ConfigError: An unknown key or a bad value; the message names it and its source.
        SystemExit: ``--help``, or a flag that does not exist.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{section}", description=f"The {section} service."
    )
    add_config_file_flag(parser)
    add_flags(parser, cls)
    given = {
        key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None
    }
    config_file = given.pop("config", None)
    return resolve(cls, section=section, flags=given, config_file=config_file)


def resolve(
    cls: type[C], *, section: str, flags: Mapping[str, Any], config_file: str | None = None
) -> Loaded[C]:
    """Layer the sources of one section and validate the result.

    Args:
        cls: The service's config model.
        section: Its name in TOML and in the environment.
        flags: Field name → value as given on the command line.
        config_file: TOML file; ``None`` = ``$SLUICEWAY_CONFIG`` if set.

    Raises:
        ConfigError: As ``load_config``.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(cls.model_fields, "default")
    path = config_file or os.environ.get(CONFIG_FILE_ENV)
    layers = [
        (f"file {path}", _from_toml(path, section=section) if path else {}),
        ("environment", _from_environment(section)),
        ("flag", dict(flags)),
    ]
    for origin, layer in layers:
        for key, value in layer.items():
            if key not in cls.model_fields:
                raise ConfigError(_unknown(key, origin=origin, known=cls.model_fields))
            values[key] = _split_if_list(value, cls.model_fields[key])
            origins[key] = origin
    try:
        return Loaded(cls(**values), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, section=section, origins=origins)) from None


def add_config_file_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--config FILE``."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with a table per service.")


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    cls: type[BaseModel],
    *,
    skip: Iterable[str] = (),
    prefix: str = "",
) -> None:
    """Add a flag per field; none has a default, so that only given flags are seen.

    Args:
        parser: Parser or group.
        cls: Config model.
        skip: Fields that get no flag here (another group has it already).
        prefix: "worker." makes the flags ``--worker.field-name``, which ``--help`` does not list.
    """
    for name, info in cls.model_fields.items():
        if name in set(skip):
            continue
        flag, dest = f"--{prefix}{name.replace('_', '-')}", f"{prefix}{name}"
        text = f"{info.description or ''} [{_default_text(info)}]".replace("%", "%%")
        shown = argparse.SUPPRESS if prefix else text
        if bool in _types_of(info):
            parser.add_argument(
                flag, dest=dest, action=argparse.BooleanOptionalAction, default=None, help=shown
            )
        else:
            parser.add_argument(flag, dest=dest, metavar=_metavar(info), default=None, help=shown)


def child_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with changes, for a process to be started."""
    return {**os.environ, **overrides}


def set_default_environment(name: str, value: str) -> None:
    """Set a variable that a library reads as it is loaded, unless the user has set it."""
    os.environ.setdefault(name, value)


def user_cache_dir() -> Path:
    """For files that can be made again: ``$XDG_CACHE_HOME/sluiceway`` or ``~/.cache/sluiceway``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluiceway"


def environment_name(section: str, field: str) -> str:
    """The environment variable of a field."""
    return f"{ENV_PREFIX}{section.upper()}__{field.upper()}"


def _from_environment(section: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        owner, separator, field = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if not name.startswith(ENV_PREFIX) or not separator:
            continue
        if owner not in SECTIONS:
            raise ConfigError(_unknown(owner, origin=f"environment {name}", known=SECTIONS))
        if owner == section:
            found[field] = value
    return found


def _from_toml(path: str, *, section: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            tables = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    for name in tables:
        if name not in SECTIONS:
            raise ConfigError(_unknown(name, origin=f"file {path}", known=SECTIONS))
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"file {path}: [{section}] must be a table")
    return table


def _split_if_list(value: Any, info: FieldInfo) -> Any:
    if isinstance(value, str) and any(typing.get_origin(t) is tuple for t in _types_of(info)):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _types_of(info: FieldInfo) -> tuple[Any, ...]:
    annotation = info.annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _metavar(info: FieldInfo) -> str:
    kind = next(t for t in _types_of(info) if t is not type(None))
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if typing.get_origin(kind) is tuple:
        return "A,B,..."
    return str(getattr(kind, "__name__", "VALUE")).upper()


def _default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    return f"default: {','.join(default) if isinstance(default, tuple) else default}"


def _unknown(key: str, *, origin: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown setting {key!r} from {origin}{hint}"


def _explain(error: ValidationError, *, section: str, origins: Mapping[str, str]) -> str:
    lines = []
    for item in error.errors():
        field = str(item["loc"][0]) if item["loc"] else "?"
        lines.append(
            f"{section}.{field} = {item.get('input')!r} "
            f"(from {origins.get(field, 'default')}): {item['msg']}"
        )
    return "; ".join(lines)
