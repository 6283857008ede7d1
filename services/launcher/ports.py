"""Chooses the ports of the children: the usual ones if free, else free ones.

Free ports are taken from below the range out of which the kernel picks source ports. A client that
redials a dead child would otherwise, once in a while, get that very port as its own source port: it
would talk to itself, and the child could not listen there again.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.errors import ConfigError

_FREE_RANGE = range(18_000, 32_000)
_MAX_TRIES = 200


@dataclass(frozen=True, slots=True)
class PortWish:
    """A port that somebody needs.

    Attributes:
        owner: Whose, for the answer and for messages ("worker").
        flag: The flag that changes it ("--port").
        host: Address that will be listened on.
        port: The wanted one; 0 = any.
        is_firm: Whether another port would not do; if so, a taken one is an error.
    """

    owner: str
    flag: str
    host: str
    port: int
    is_firm: bool


def choose_ports(wishes: Iterable[PortWish], *, seed: int) -> list[int]:
    """Grant each wish, in order, a port that is free now and that no earlier wish got.

    Args:
        wishes: What is needed.
        seed: Where the search for free ports starts, so that two launchers rarely collide.

    Raises:
        ConfigError: A firm port is taken; the message says how to choose another.
    """
    draws = random.Random(seed)
    taken: set[int] = set()
    ports = []
    for wish in wishes:
        port = _grant(wish, taken=taken, draws=draws)
        taken.add(port)
        ports.append(port)
    return ports


def _grant(wish: PortWish, *, taken: set[int], draws: random.Random) -> int:
    if wish.port and wish.port not in taken and is_free(wish.host, wish.port):
        return wish.port
    if wish.port and wish.is_firm:
        raise ConfigError(
            f"port {wish.port} on {wish.host} is in use: stop what listens there, or choose "
            f"another with {wish.flag} N ({wish.flag} 0 = any free one)"
        )
    for _ in range(_MAX_TRIES):
        port = draws.choice(_FREE_RANGE)
        if port not in taken and is_free(wish.host, port):
            return port
    raise ConfigError(f"no free port for {wish.owner} found on {wish.host}")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now.

    Raises:
        ConfigError: ``host`` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections that linger after a close are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ConfigError(f"cannot listen on {host!r}: {error.strerror}") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"cannot listen on {host}: no address of this machine") from error
            return False
    return True
