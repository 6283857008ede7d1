"""Tells everyone who waits that something has changed."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Signal:
    """``fire`` wakes all who wait at that moment; whoever comes later waits for the next one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake everyone who waits."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, *, timeout_s: float) -> None:
        """Wait for the next ``fire``, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
