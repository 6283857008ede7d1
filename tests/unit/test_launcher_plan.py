"""From flags to the command lines of the children."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.config import load_config
from services.common.errors import ConfigError
from services.launcher.plan import ChildSpec, plan_children, port_wishes, slots
from services.launcher.settings import (
    SERVICES,
    GivenFlags,
    config_class,
    resolve_settings,
    served_name,
)

TOKEN = "a-cluster-token"


def plan(model: str = "smollm2", *, model_dir: str = "/models/m", **given: Any) -> list[ChildSpec]:
    own = {service: given.pop(service) for service in SERVICES if service in given}
    settings = resolve_settings(model, GivenFlags(given, own))
    ports = [18_000 + i for i in range(len(port_wishes(settings)))]
    return plan_children(
        settings, model_dir=model_dir, ports=ports, cluster_token=TOKEN, parent_pid=42
    )


def by_name(children: list[ChildSpec]) -> dict[str, ChildSpec]:
    return {child.name: child for child in children}


def read_back(child: ChildSpec) -> Any:
    """What the service itself makes of its command line."""
    cls = config_class(child.service)
    return load_config(cls, section=child.service, argv=child.argv[3:]).config


def test_the_five_services_are_started_as_containers_start_them() -> None:
    children = plan()
    assert [child.service for child in children] == list(SERVICES)
    for child in children:
        assert child.argv[:3] == (sys.executable, "-m", f"services.{child.service}")


def test_every_command_line_is_understood_by_its_service() -> None:
    for child in plan(workers=2, log_level="debug"):
        config = read_back(child)
        assert config.parent_pid == 42
        assert config.log_format == "json"
        assert config.log_level == "debug"


def test_each_service_gets_the_addresses_of_the_next() -> None:
    children = by_name(plan())
    scheduler = children["scheduler"].address
    assert read_back(children["gateway"]).tokenizers == (children["tokenizer"].address,)
    assert read_back(children["tokenizer"]).schedulers == (scheduler,)
    assert read_back(children["worker"]).schedulers == (scheduler,)
    kvstore = children["kvstore"].address
    assert kvstore in " ".join(children["scheduler"].argv)


def test_addresses_that_the_user_names_stay() -> None:
    children = by_name(plan(worker={"schedulers": "10.0.0.1:50052"}))
    assert read_back(children["worker"]).schedulers == ("10.0.0.1:50052",)


def test_workers_n_makes_n_workers_with_ports_of_their_own() -> None:
    children = plan(workers=3)
    workers = [child for child in children if child.service == "worker"]
    assert [child.name for child in workers] == ["worker-1", "worker-2", "worker-3"]
    assert len({read_back(child).port for child in children}) == len(children)


def test_a_flag_goes_to_every_service_that_has_the_field() -> None:
    children = by_name(plan(served_model_name="mine", max_model_len="512"))
    assert read_back(children["worker"]).served_model_name == "mine"
    assert read_back(children["tokenizer"]).served_model_name == "mine"
    assert read_back(children["worker"]).max_model_len == 512


def test_a_flag_with_a_prefix_goes_to_one_service() -> None:
    children = by_name(plan(log_level="error", worker={"log_level": "debug"}))
    assert read_back(children["worker"]).log_level == "debug"
    assert read_back(children["scheduler"]).log_level == "error"


def test_host_and_port_are_the_gateways() -> None:
    children = by_name(plan(host="0.0.0.0"))
    assert read_back(children["gateway"]).host == "0.0.0.0"
    assert children["gateway"].url.startswith("http://127.0.0.1:")
    assert read_back(children["worker"]).host == "127.0.0.1"


def test_switches_are_handed_on_both_ways() -> None:
    children = by_name(plan(enable_prefix_caching=False))
    assert read_back(children["scheduler"]).enable_prefix_caching is False


def test_secrets_go_through_the_environment_and_never_through_the_command_line() -> None:
    children = by_name(plan(api_key="sk-secret"))
    for child in children.values():
        assert TOKEN not in " ".join(child.argv)
        assert child.environment[f"SLUICEWAY_{child.service.upper()}__CLUSTER_TOKEN"] == TOKEN
    gateway = children["gateway"]
    assert "sk-secret" not in " ".join(gateway.argv)
    assert gateway.environment["SLUICEWAY_GATEWAY__API_KEY"] == "sk-secret"


def test_the_served_name_is_the_last_part_of_what_the_user_typed() -> None:
    assert served_name("smollm2") == "smollm2"
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen3-0.6B"
    assert served_name("/models/mine/") == "mine"
    children = by_name(plan("Qwen/Qwen3-0.6B", model_dir="/cache/snapshots/0123abc"))
    assert read_back(children["worker"]).model_name == "Qwen3-0.6B"
    assert read_back(children["worker"]).model == Path("/cache/snapshots/0123abc")


def test_the_gateways_port_is_firm_and_internal_ones_are_not() -> None:
    settings = resolve_settings("smollm2", GivenFlags())
    wishes = port_wishes(settings)
    assert len(wishes) == 2 * len(slots(settings))
    assert [(w.owner, w.port, w.flag) for w in wishes if w.is_firm] == [("gateway", 8000, "--port")]
    internal = {w.owner: w.port for w in wishes[0::2] if not w.is_firm}
    assert internal == {"tokenizer": 50051, "scheduler": 50052, "worker": 50053, "kvstore": 50054}


def test_an_internal_port_that_the_user_names_is_firm() -> None:
    settings = resolve_settings("smollm2", GivenFlags({}, {"scheduler": {"port": "50099"}}))
    firm = [w for w in port_wishes(settings) if w.is_firm and w.owner == "scheduler"]
    assert [(w.port, w.flag) for w in firm] == [(50099, "--scheduler.port")]


def test_a_bad_value_is_an_error_that_names_service_field_value_and_source() -> None:
    with pytest.raises(ConfigError, match=r"worker\.max_num_seqs = 'many' \(from flag\)"):
        plan(max_num_seqs="many")


def test_different_cluster_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="cluster_token must be the same"):
        plan(worker={"cluster_token": "another"})
