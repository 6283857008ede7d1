"""The settings of one ``sluiceway serve``: those of each service and the launcher's own.

A flag without a prefix goes to every service that has the field, ``--worker.block-size`` to one.
``--host`` and ``--port`` are the gateway's, the door that users see.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from services.common.config import Loaded, ServiceConfig, resolve
from services.common.errors import ConfigError

SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "kvstore")
DEFAULT_MODEL = "smollm2"

_CLASSES = {
    "gateway": "GatewayConfig",
    "tokenizer": "TokenizerConfig",
    "scheduler": "SchedulerConfig",
    "worker": "WorkerConfig",
    "kvstore": "KvStoreConfig",
}
GATEWAY_ONLY = frozenset({"host", "port"})
# What a child is given by the launcher; one service alone may still be told with its prefix.
LAUNCHER_ONLY = frozenset({"http_port", "log_format", "parent_pid", "model"})


class ServeConfig(BaseModel):
    """What the launcher itself can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: int = Field(1, ge=1, le=64, description="Number of worker processes.")
    restart: bool = Field(
        True, description="Start a child again that dies after everything was ready."
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="How the merged log looks: for people or for machines."
    )


@dataclass(frozen=True, slots=True)
class GivenFlags:
    """Flags of the command line by field name, before it is known which service has which.

    Attributes:
        shared: Those without a prefix.
        own: Service → those with its prefix.
        config_file: TOML file, if named.
    """

    shared: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config_file: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything resolved.

    Attributes:
        model: As the user named it, or the default one.
        serve: The launcher's own.
        services: Service → config and origins.
        flags: Service → the flags that resolved so, to be handed on to the child.
        config_file: TOML file to be handed on.
    """

    model: str
    serve: Loaded[ServeConfig]
    services: Mapping[str, Loaded[ServiceConfig]]
    flags: Mapping[str, Mapping[str, Any]]
    config_file: str | None


def config_class(service: str) -> type[ServiceConfig]:
    """The config model of a service; imported only when asked for."""
    module = importlib.import_module(f"services.{service}.config")
    return cast("type[ServiceConfig]", getattr(module, _CLASSES[service]))


def split_flags(values: Mapping[str, Any]) -> GivenFlags:
    """Sort what argparse found.

    Args:
        values: dest → value as ``common/config.py: add_flags`` names them; ``None`` = not given.
    """
    shared: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {service: {} for service in SERVICES}
    for dest, value in values.items():
        service, dot, name = dest.partition(".")
        if value is None or dest == "config":
            continue
        if dot:
            own[service][name] = value
        else:
            shared[dest] = value
    return GivenFlags(shared, own, values.get("config"))


def resolve_settings(model: str | None, given: GivenFlags) -> Settings:
    """Layer defaults, file, environment and flags for every service.

    Args:
        model: ``smollm2``, a directory, or a hub id; ``None`` = the default one.
        given: Flags of the command line.

    Raises:
        ConfigError: An unknown key or a bad value; names it and its source.
    """
    used_model = DEFAULT_MODEL if model is None else model
    serve = resolve(
        ServeConfig,
        section="serve",
        flags={k: v for k, v in given.shared.items() if k in ServeConfig.model_fields},
        config_file=given.config_file,
    )
    services: dict[str, Loaded[ServiceConfig]] = {}
    flags: dict[str, Mapping[str, Any]] = {}
    for service in SERVICES:
        cls = config_class(service)
        named = _flags_of(service, cls, given)
        flags[service] = _model_flags(cls, used_model) | named
        loaded = resolve(cls, section=service, flags=flags[service], config_file=given.config_file)
        if model is None and "model" in flags[service].keys() - named.keys():
            loaded = replace(loaded, origins={**loaded.origins, "model": "default"})
        services[service] = loaded
    _refuse_different_tokens(services)
    return Settings(used_model, serve, services, flags, given.config_file)


def _flags_of(service: str, cls: type[ServiceConfig], given: GivenFlags) -> dict[str, Any]:
    barred = LAUNCHER_ONLY if service == "gateway" else LAUNCHER_ONLY | GATEWAY_ONLY
    shared = {
        name: value
        for name, value in given.shared.items()
        if name in cls.model_fields and name not in barred
    }
    return shared | dict(given.own.get(service, {}))


def _model_flags(cls: type[ServiceConfig], model: str) -> dict[str, Any]:
    """What the MODEL argument means to a service that knows of models."""
    return {"model": model} if "model" in cls.model_fields else {}


def served_name(model: str) -> str:
    """The name by which clients ask for a model: the last part of its path or hub id."""
    return PurePath(model).name or model


def _refuse_different_tokens(services: Mapping[str, Loaded[ServiceConfig]]) -> None:
    tokens = {loaded.config.cluster_token for loaded in services.values()}
    if len(tokens) > 1:
        raise ConfigError("cluster_token must be the same for every service, or set for none")
