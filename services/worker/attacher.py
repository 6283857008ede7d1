"""Keeps the worker attached to one of its schedulers for as long as the process lives.

Schedulers are tried in rendezvous-hash order of the worker's label, so that workers spread over
them without being told. Every attachment is a new engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Iterable

from services.common.rpc import Endpoints
from services.common.telemetry import get_logger
from services.worker import metrics
from services.worker.executor import Executor
from services.worker.identity import Identity, new_engine_id
from services.worker.scheduler_link import End, Outcome, SchedulerLink
from services.worker.state import WorkerState

log = get_logger(__name__)

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
AVOID_S = 30.0
"""How long a scheduler that drained this worker is not dialled again."""


def rendezvous_order(worker_id: str, addresses: Iterable[str]) -> list[str]:
    """Addresses by falling hash of (worker, address): Thaler and Ravishankar 1998.

    Every worker has its own order, and a lost scheduler's workers spread over all the others.
    """
    return sorted(
        addresses, key=lambda address: hashlib.sha256(f"{worker_id} {address}".encode()).digest()
    )


class Attacher:
    """Dials, attaches, and dials again."""

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        cluster_token: str | None,
        identity: Identity,
        state: WorkerState,
        executor: Executor,
        leaving: asyncio.Event,
    ) -> None:
        """
        Args:
            endpoints: The schedulers.
            cluster_token: What the calls carry.
            identity: Who attaches.
            state: Told of everything.
            executor: Made idle and empty before each attachment.
            leaving: Set when the worker wants to drain; ``run`` then returns.
        """
        self._endpoints = endpoints
        self._cluster_token = cluster_token
        self._identity = identity
        self._state = state
        self._executor = executor
        self._leaving = leaving
        self._num_failures = 0
        self._redirect: str | None = None
        self._avoid_until: dict[str, float] = {}

    async def run(self) -> None:
        """Stay attached until the worker leaves."""
        while not self._leaving.is_set():
            address = await self._next_address()
            if address is not None:
                outcome = await self._attach(address)
                self._note(address, outcome)
            await self._pause()

    async def _attach(self, address: str) -> Outcome:
        if self._state.facts is not None:
            # Steps of the attachment before may still run; their rows must not outlive them.
            await asyncio.wrap_future(self._executor.reset())
        self._state.engine_id = new_engine_id(after=self._state.engine_id)
        link = SchedulerLink(
            address,
            cluster_token=self._cluster_token,
            identity=self._identity,
            state=self._state,
            executor=self._executor,
            leaving=self._leaving,
        )
        return await link.run()

    def _note(self, address: str, outcome: Outcome) -> None:
        metrics.ATTACHMENTS.labels(end=outcome.end.value).inc()
        self._redirect = outcome.redirect or None
        self._num_failures = 0 if outcome.was_welcome else self._num_failures + 1
        if outcome.end is End.DRAINED:
            self._avoid_until[address] = time.monotonic() + AVOID_S
        if not self._leaving.is_set():
            log.warning(
                "detached",
                scheduler=address,
                end=outcome.end.value,
                detail=outcome.detail,
                num_failures=self._num_failures,
            )

    async def _next_address(self) -> str | None:
        if self._redirect is not None:
            return self._redirect
        now = time.monotonic()
        order = [
            address
            for address in rendezvous_order(
                self._identity.worker_id, await self._endpoints.resolve()
            )
            if self._avoid_until.get(address, 0.0) <= now
        ]
        return order[self._num_failures % len(order)] if order else None

    async def _pause(self) -> None:
        """Wait before the next try, longer with every failure, or until the worker leaves."""
        longest = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures, 10), MAX_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            # Spread: the workers of a scheduler that died do not all dial at the same moment.
            async with asyncio.timeout(random.uniform(0.5, 1.0) * longest):
                await self._leaving.wait()
