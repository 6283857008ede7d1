"""What the README says there is, is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types import EmbeddingCreateParams
from pydantic import BaseModel
from starlette.routing import Route

from services.cli import main
from services.common.errors import InvalidRequest
from services.gateway.admission import Admission
from services.gateway.anthropic.plan import plan_message
from services.gateway.anthropic.schema import MessagesRequest
from services.gateway.auth import OPEN_PATHS
from services.gateway.config import GatewayConfig
from services.gateway.fleet import Fleet
from services.gateway.openai.embeddings import EmbeddingRequest, plan_embeddings
from services.gateway.openai.plan import Caller
from services.gateway.response_jobs import ResponseJobs
from services.gateway.server import assemble
from services.gateway.tokenizer_client import TokenizerClient
from services.launcher.settings import SERVICES, config_class
from tests.fakes.tokenizer import MODEL
from tests.unit.gateway.desk import planning, response_store
from tests.unit.gateway.field_status import BODIES, known_fields, status

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = ("serve", "chat", "pull", "config")


def tracked_folders() -> set[PurePosixPath]:
    """Every folder that holds a file of the repository."""
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return {folder for file in done.stdout.splitlines() for folder in PurePosixPath(file).parents}


def folders_of_the_tree() -> list[PurePosixPath]:
    """The folders in the README's tree; two spaces of indentation are one level."""
    block = README.split("## The tree")[1].split("```")[1]
    found: list[PurePosixPath] = []
    parents: list[str] = []
    for line in filter(None, block.splitlines()):
        name = line.split()[0]
        level = (len(line) - len(line.lstrip())) // 2
        parents[level:] = [name.rstrip("/")]
        found.append(PurePosixPath(*parents))
    return found


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Every flag that a command's help lists."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", capsys.readouterr().out))


def test_the_tree_names_every_folder_of_services_and_of_the_top_level() -> None:
    folders = tracked_folders() - {PurePosixPath(".")}
    expected = {f for f in folders if f.parts[0] == "services" or len(f.parts) == 1}
    assert expected - set(folders_of_the_tree()) == set()


def test_the_tree_names_nothing_that_is_not_there_and_nothing_twice() -> None:
    named = folders_of_the_tree()
    assert [folder for folder in named if folder not in tracked_folders()] == []
    assert len(set(named)) == len(named)


def test_every_folder_of_the_tree_has_a_comment() -> None:
    block = README.split("## The tree")[1].split("```")[1]
    bare = [line.strip() for line in block.splitlines() if line and len(line.split()) < 2]
    assert bare == ["tests/"]  # what it holds is told below it


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(code())))
    assert {"serve", "test"} <= named <= targets


def test_every_command_and_flag_of_sluiceway_exists(capsys: pytest.CaptureFixture[str]) -> None:
    flags = set().union(*(flags_of(command, capsys) for command in COMMANDS))
    ours = [text for text in code() if "sluiceway" in text or "SERVE_FLAGS" in text]
    named_commands = {word for text in ours for word in re.findall(r"sluiceway ([a-z]+)", text)}
    named_flags = {word for text in ours for word in re.findall(r"(?<!\w)--[a-z][\w-]*", text)}
    assert {"serve", "chat", "config"} <= named_commands <= set(COMMANDS)
    assert {"--port", "--dtype"} <= named_flags <= flags


@pytest.mark.parametrize("service", SERVICES)
def test_the_ports_of_the_table_are_the_defaults(service: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {service} |")]
    grpc_port, http_port = (text.strip() for text in row.split("|")[-2].split("/"))
    fields = config_class(service).model_fields
    ports = (fields["port"].default, fields["http_port"].default)
    expected = ("–", str(ports[0])) if service == "gateway" else tuple(map(str, ports))  # noqa: RUF001
    assert (grpc_port, http_port) == expected


def table(header: str) -> list[list[str]]:
    """The cells of each row below a header."""
    lines = README.split(header + "\n")[1].splitlines()[1:]
    end = lines.index("")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def names_in(cell: str) -> list[str]:
    """What a cell has in backticks, but for flags."""
    return [name for name in re.findall(r"`([^`]+)`", cell) if not name.startswith("--")]


def routes() -> set[str]:
    """ "METHOD /path" of every route that the gateway has."""
    fleet = Fleet(clock=lambda: 0.0)
    client = TokenizerClient((), fleet=fleet, cluster_token=None)
    admission, store = Admission(1), response_store()
    app = assemble(
        GatewayConfig(),
        fleet=fleet,
        client=client,
        admission=admission,
        store=store,
        jobs=ResponseJobs(store, admission),
    )
    found = {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    hidden = [one for one in app.routes if isinstance(one, Route) and not one.include_in_schema]
    return found | {f"GET {route.path}" for route in hidden}


def test_the_table_of_routes_has_each_route_and_says_which_need_a_key() -> None:
    told = {
        route: (state.partition(":")[0].partition(",")[0], key)
        for cell, state, key in table("| route | | |")
        for route in names_in(cell)
    }
    assert told.keys() == routes()
    assert {state for state, _ in told.values()} == {"works"}
    for route, (_, key) in told.items():
        assert key == ("open" if route.split()[1] in OPEN_PATHS else "key"), route


def test_the_table_of_fields_says_what_becomes_of_each_and_leaves_none_out() -> None:
    told: dict[str, tuple[str, ...]] = {}
    for *states, cell in table("| chat | completions | responses | fields |"):
        for name in names_in(re.sub(r"\([^)]*\)", "", cell)):
            assert name not in told, name
            told[name] = tuple(states)
    assert told == {
        name: tuple(status(route, name).value for route in BODIES)
        for name in known_fields().union(told)
    }


SHAPES: dict[str, tuple[Any, type[BaseModel], Any, dict[str, Any]]] = {
    "embeddings": (plan_embeddings, EmbeddingRequest, EmbeddingCreateParams, {"input": "x"}),
    "messages": (
        plan_message,
        MessagesRequest,
        MessageCreateParamsBase,
        {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    ),
}


@pytest.mark.parametrize("route", SHAPES)
def test_the_tables_of_other_shapes_say_what_becomes_of_each_field(route: str) -> None:
    _, body, params, _ = SHAPES[route]
    rows = table(f"| {route} | fields |")
    told = {
        name: state for state, cell in rows for name in names_in(re.sub(r"\([^)]*\)", "", cell))
    }
    names = {*told, *body.model_fields, *params.__annotations__}
    assert told == {name: shape_status(route, name) for name in names}


def shape_status(route: str, name: str) -> str:
    """What becomes of a field."""
    plan, body, _, least = SHAPES[route]
    if name in body.model_fields:
        description = body.model_fields[name].description or ""
        return "accepted" if description.startswith("Accepted") else "works"
    fields = {"model": MODEL, **least, name: "no value that means anything"}
    with pytest.raises(InvalidRequest, match=f"{name} is not supported here"):
        plan(fields, Caller(), planning(), now=0)
    return "refused"


def code() -> list[str]:
    """What is set as code: lines of blocks (the tree is none) and spans."""
    blocks = README.replace(README.split("## The tree")[1].split("```")[1], "").split("```")[1::2]
    prose = "".join(README.split("```")[0::2])
    return [line for block in blocks for line in block.splitlines()] + re.findall(
        r"`([^`]+)`", prose
    )
