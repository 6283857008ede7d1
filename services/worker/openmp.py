"""How long torch's OpenMP threads spin when they have nothing to do.

A thread that waits at the end of a parallel region spins for milliseconds by default. On a machine
whose cores are shared, and five processes always share them, it spins on a core that another
thread, or the gateway, needs; without any spinning every region pays for a wake-up instead.
"""

from __future__ import annotations

import sys

from services.common.config import set_default_environment
from services.common.errors import InvariantError

_SPIN_COUNT = "GOMP_SPINCOUNT"


def limit_spinning(spin_count: int) -> None:
    """Have OpenMP's threads sleep after so many rounds of waiting; a user's own setting stays.

    Args:
        spin_count: Rounds of libgomp, some nanoseconds each.

    Raises:
        InvariantError: torch is loaded already; OpenMP reads the setting as it is loaded.
    """
    if "torch" in sys.modules:
        raise InvariantError("OpenMP cannot be told how to wait: torch is loaded already")
    set_default_environment(_SPIN_COUNT, str(spin_count))
