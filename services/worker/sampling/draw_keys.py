"""Keys of many draws: ``common.sampling.draw_key`` over arrays (a test holds them equal)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.worker.sampling.base import Ints

Keys: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def draw_keys(seeds: Ints, *, choices: Ints, positions: Ints) -> Keys:
    """Keys of target draws (stream 0).

    Args:
        seeds: ``[n]``: of the requests.
        choices: ``[n]``: index of the choice.
        positions: ``[n]``: index in the sequence of the token to be drawn.

    Returns:
        ``[n]``.
    """
    state = seeds.astype(np.uint64)
    for values in (choices, positions, np.zeros_like(positions)):
        state = _mix64(state ^ (values.astype(np.uint64) * _GOLDEN + _GOLDEN))
    return state


def _mix64(values: Keys) -> Keys:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
