"""Which ports the children get."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from services.common.errors import ConfigError
from services.launcher.ports import PortWish, choose_ports, is_free

HOST = "127.0.0.1"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        yield server.getsockname()[1]


def wish(port: int, *, is_firm: bool = False) -> PortWish:
    return PortWish(owner="worker", flag="--port", host=HOST, port=port, is_firm=is_firm)


def test_a_free_default_is_taken_as_it_is() -> None:
    (port,) = choose_ports([wish(0)], seed=1)
    assert choose_ports([wish(port)], seed=2) == [port]


def test_a_taken_default_gives_way_to_a_free_port(taken_port: int) -> None:
    (port,) = choose_ports([wish(taken_port)], seed=1)
    assert port != taken_port
    assert is_free(HOST, port)


def test_a_taken_firm_port_is_an_error_that_names_the_fix(taken_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"{taken_port}.*in use.*--port N"):
        choose_ports([wish(taken_port, is_firm=True)], seed=1)


def test_no_two_children_get_the_same_port() -> None:
    (free,) = choose_ports([wish(0)], seed=1)
    ports = choose_ports([wish(free), wish(free), wish(0), wish(0)], seed=1)
    assert len(set(ports)) == 4


def test_free_ports_are_below_the_range_of_source_ports() -> None:
    assert all(port < 32_768 for port in choose_ports([wish(0)] * 20, seed=3))


def test_a_host_that_is_not_ours_is_an_error_that_says_so() -> None:
    foreign = PortWish(owner="gateway", flag="--port", host="192.0.2.1", port=80, is_firm=True)
    with pytest.raises(ConfigError, match="no address of this machine"):
        choose_ports([foreign], seed=1)
