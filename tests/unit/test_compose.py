"""docker-compose.yml and the Dockerfile agree with the services that they run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.config import load_config
from services.launcher.settings import SERVICES, config_class

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CACHE = "/cache"


def config_of(service: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a service makes of its container's command line and environment."""
    container = COMPOSE["services"][service]
    for name in container["environment"]:
        monkeypatch.setenv(name, "token")
    argv = [str(word) for word in container["command"]]
    return load_config(config_class(service), section=service, argv=argv).config


def stages() -> dict[str, str]:
    """Stage of the Dockerfile → its text."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_five_services_and_the_one_shot_are_there_by_name() -> None:
    assert set(COMPOSE["services"]) == {*SERVICES, "model"}


@pytest.mark.parametrize("service", SERVICES)
def test_every_command_line_is_understood(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(service, monkeypatch)
    assert config.cluster_token == "token"
    assert config.host == "0.0.0.0"


@pytest.mark.parametrize("service", SERVICES)
def test_every_image_holds_its_extra_only(service: str) -> None:
    assert COMPOSE["services"][service]["build"]["target"] == service
    stage = stages()[service]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.findall(r"'\.\[([\w,]+)\]'", stage) == [service]
    assert service in extras["optional-dependencies"]
    assert ("torch" in stage) == (service == "worker")
    assert f'ENTRYPOINT ["python", "-m", "services.{service}"]' in stage


def test_the_model_is_served_from_where_the_one_shot_puts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = COMPOSE["services"]["model"]
    assert model["command"] == ["smollm2", "--cache-dir", CACHE]
    assert model["volumes"] == [f"models:{CACHE}"]
    for service in ("worker", "tokenizer"):
        container = COMPOSE["services"][service]
        # See ``services/pull/packaged.py``: models/<name> below the cache.
        assert config_of(service, monkeypatch).model == Path(CACHE) / "models" / "smollm2"
        assert container["volumes"] == [f"models:{CACHE}:ro"]
        assert container["depends_on"] == {"model": {"condition": "service_completed_successfully"}}
    assert f"mkdir {CACHE} && chown sluiceway {CACHE}" in stages()["model"]


@pytest.mark.parametrize("service", SERVICES)
def test_the_health_check_asks_the_port_that_is_listened_on(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *command, url = COMPOSE["services"][service]["healthcheck"]["test"]
    assert command == ["CMD", "python", "-m", "services.probe"]
    port = config_of(service, monkeypatch).port
    assert url == (
        f"http://127.0.0.1:{port}/live" if service == "gateway" else f"grpc://127.0.0.1:{port}"
    )


@pytest.mark.parametrize(
    ("service", "field", "peer"),
    [
        ("gateway", "tokenizers", "tokenizer"),
        ("tokenizer", "schedulers", "scheduler"),
        ("tokenizer", "kvstores", "kvstore"),
        ("worker", "schedulers", "scheduler"),
        ("scheduler", "kvstores", "kvstore"),
    ],
)
def test_every_service_finds_the_next_by_its_name(
    service: str, field: str, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = config_class(peer).model_fields["port"].default
    assert getattr(config_of(service, monkeypatch), field) == (f"dns:///{peer}:{port}",)


def test_workers_can_be_scaled() -> None:
    worker = COMPOSE["services"]["worker"]
    assert not {"container_name", "ports", "hostname"} & set(worker)
