"""The gateway's door: how many requests are inside, and that none enter while it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import Overloaded, Unavailable


class Admission:
    """Counts the requests inside.

    Open → closed (nobody enters, those inside go on) → cut off (those inside end with an error).
    """

    def __init__(self, max_in_flight: int) -> None:
        """
        Args:
            max_in_flight: Most requests inside at one time.
        """
        self.num_in_flight = 0
        self._max = max_in_flight
        self._is_closed = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._cut_off = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether the gateway is stopping."""
        return self._is_closed

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Be inside for the length of a request.

        Raises:
            Overloaded: It is full.
            Unavailable: It is closed.
        """
        if self._is_closed:
            raise Unavailable("the gateway is stopping", retry_after_s=1)
        if self.num_in_flight >= self._max:
            raise Overloaded(
                f"{self._max} requests are being served already; try again soon", retry_after_s=1
            )
        self.num_in_flight += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._empty.set()

    async def drain(self, timeout_s: float) -> None:
        """Close the door, wait for those inside, and cut off who is left after ``timeout_s``."""
        self._is_closed = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            self._cut_off.set()
            await self._empty.wait()

    async def wait_cut_off(self) -> None:
        """Raise once those inside have to end.

        Raises:
            Unavailable: Always, then.
        """
        await self._cut_off.wait()
        raise Unavailable("the gateway was stopped before the request was finished")
