"""What is to be started: the command line, the environment and the address of every child. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.config import ServiceConfig, environment_name
from services.launcher.ports import PortWish
from services.launcher.settings import SERVICES, Settings, served_name

# A field that lists addresses → whose they are.
_PEERS = {
    "tokenizers": "tokenizer",
    "schedulers": "scheduler",
    "kvstores": "kvstore",
}
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to be started.

    Attributes:
        name: For people: the service, numbered if there are several ("worker-2").
        service: Which of the five.
        argv: Its command line.
        environment: Variables to be added to the launcher's own.
        address: "host:port" under which this machine reaches it: HTTP for the gateway, gRPC else.
    """

    name: str
    service: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    address: str

    @property
    def url(self) -> str:
        """Its address, with a scheme where it speaks HTTP: the gateway."""
        return f"http://{self.address}" if self.service == "gateway" else self.address


@dataclass(frozen=True, slots=True)
class Slot:
    """A child before it has ports."""

    name: str
    service: str


def slots(settings: Settings) -> list[Slot]:
    """The children, in the order in which they are shown."""
    found = []
    for service in SERVICES:
        count = settings.serve.config.workers if service == "worker" else 1
        names = [service] if count == 1 else [f"{service}-{i + 1}" for i in range(count)]
        found += [Slot(name, service) for name in names]
    return found


def port_wishes(settings: Settings) -> list[PortWish]:
    """Two ports for each child, in the order of ``slots``: ``port``, then ``http_port``."""
    return [
        _wish(settings, slot, field) for slot in slots(settings) for field in ("port", "http_port")
    ]


def _wish(settings: Settings, slot: Slot, field: str) -> PortWish:
    loaded = settings.services[slot.service]
    is_gateway_door = slot.service == "gateway" and field == "port"
    flag = "--port" if is_gateway_door else f"--{slot.service}.{field.replace('_', '-')}"
    return PortWish(
        owner=slot.name,
        flag=flag,
        host=loaded.config.host,
        port=getattr(loaded.config, field),
        is_firm=is_gateway_door
        or (loaded.origins[field] != "default" and slot.name in (slot.service, "worker-1")),
    )


def plan_children(
    settings: Settings,
    *,
    model_dir: str,
    ports: Sequence[int],
    cluster_token: str,
    parent_pid: int,
) -> list[ChildSpec]:
    """Make the command line of every child.

    Args:
        settings: Resolved.
        model_dir: Where the model lies.
        ports: As granted for ``port_wishes``.
        cluster_token: Given to every child through its environment, which other users cannot see.
        parent_pid: The children end with this process.
    """
    placed = list(zip(slots(settings), ports[0::2], ports[1::2], strict=True))
    addresses: dict[str, list[str]] = {service: [] for service in SERVICES}
    for slot, port, _ in placed:
        addresses[slot.service].append(_address(settings.services[slot.service].config.host, port))
    made: dict[str, int] = dict.fromkeys(SERVICES, 0)
    children = []
    for slot, port, http_port in placed:
        given = {"port": port, "http_port": http_port, "parent_pid": parent_pid}
        given |= {"log_format": "json"} | _model_flags(settings, slot.service, model_dir)
        given |= _peer_flags(settings, slot.service, addresses)
        children.append(
            _child(
                settings,
                slot,
                flags={**settings.flags[slot.service], **given},
                cluster_token=cluster_token,
                address=addresses[slot.service][made[slot.service]],
            )
        )
        made[slot.service] += 1
    return children


def _model_flags(settings: Settings, service: str, model_dir: str) -> dict[str, Any]:
    origins = settings.services[service].origins
    flags: dict[str, Any] = {"model": model_dir} if "model" in origins else {}
    if origins.get("served_model_name") == "default":
        flags["served_model_name"] = served_name(settings.model)
    return flags


def _peer_flags(
    settings: Settings, service: str, addresses: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Addresses of this machine's children, unless the user has named others."""
    origins = settings.services[service].origins
    return {
        field: tuple(addresses[peer])
        for field, peer in _PEERS.items()
        if origins.get(field) == "default"
    }


def _child(
    settings: Settings, slot: Slot, *, flags: Mapping[str, Any], cluster_token: str, address: str
) -> ChildSpec:
    config = settings.services[slot.service].config
    secrets = {k: v for k, v in flags.items() if is_secret(type(config), k)}
    environment = {environment_name(slot.service, k): _text(v) for k, v in secrets.items()}
    environment[environment_name(slot.service, "cluster_token")] = cluster_token
    argv = [sys.executable, "-m", f"services.{slot.service}"]
    if settings.config_file is not None:
        argv += ["--config", settings.config_file]
    for field, value in flags.items():
        if field not in secrets:
            argv += _flag(field, value)
    return ChildSpec(slot.name, slot.service, tuple(argv), environment, address)


def is_secret(cls: type[ServiceConfig], field: str) -> bool:
    """Whether a setting is not to be shown: neither in ``ps`` nor by ``sluiceway config``."""
    return not cls.model_fields[field].repr


def _flag(field: str, value: Any) -> Iterator[str]:
    name = field.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    else:
        # One word, so that a value may begin with a dash.
        yield f"--{name}={_text(value)}"


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _address(host: str, port: int) -> str:
    host = _ANY_HOST.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
