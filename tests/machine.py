"""How much of a core this machine really gives us, whatever its counters say."""

from __future__ import annotations

import time

GAP_S = 0.002
"""A busy loop that sees the clock jump by more has not been running meanwhile."""


def cpu_share(measure_s: float = 0.3) -> float:
    """Share of a core that a busy loop gets now: 0 to 1.

    The host of a virtual machine may take its cores away for most of the time without the guest's
    own counters showing it; jumps of the clock do.
    """
    began = last = time.perf_counter()
    lost_s = 0.0
    while last - began < measure_s:
        now = time.perf_counter()
        if now - last > GAP_S:
            lost_s += now - last
        last = now
    return 1.0 - lost_s / (last - began)
