"""Wakes all that wait for the next change."""

from __future__ import annotations

import asyncio


class Bell:
    """Take ``next_ring`` before looking at a state, look, then await it: no change is missed."""

    def __init__(self) -> None:
        self._ring = asyncio.Event()

    def ring(self) -> None:
        """Something has changed."""
        self._ring.set()
        self._ring = asyncio.Event()

    def next_ring(self) -> asyncio.Event:
        """Is set by the next ``ring``."""
        return self._ring
