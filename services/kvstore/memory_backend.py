"""``memory://``: the index of one process alone. An event is applied, then acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.common.telemetry import get_logger
from services.kvstore.events import Ack, AckStatus, EngineRecord, KvEvents
from services.kvstore.index import PrefixIndex
from services.kvstore.leases import Leases

_TICK_S = 0.25
_SWEEP_KEYS = 16_384

log = get_logger(__name__)


class MemoryBackend:
    """An index that lives and dies with its process; publishers fill it again by snapshots.

    Attributes:
        index: What matches are answered from.
    """

    is_degraded = False

    def __init__(self, index: PrefixIndex, *, lease_s: float, clock: Callable[[], float]) -> None:
        """
        Args:
            index: An empty index.
            lease_s: How long an engine outlives its publisher's stream, in seconds.
            clock: Monotonic time in seconds.
        """
        self.index = index
        self._leases = Leases(lease_s=lease_s)
        self._clock = clock

    async def publish(self, events: KvEvents, *, record: EngineRecord, stream: int) -> Ack:
        """See ``IndexBackend``."""
        # Held first: an event that is refused may have put the engine on the list.
        self._leases.hold(events.engine_id, stream=stream)
        ack = self.index.apply(events, record=record)
        if events.is_gone or ack.status is AckStatus.FENCED:
            self._leases.forget(events.engine_id)
        return ack

    def end_stream(self, stream: int) -> None:
        """See ``IndexBackend``."""
        self._leases.end_stream(stream, now=self._clock())

    async def run(self) -> None:
        """End leases and free memory."""
        while True:
            self.expire()
            await sweep(self.index)
            await asyncio.sleep(_TICK_S)

    def expire(self) -> None:
        """Forget the engines whose publisher has not come back in time."""
        for engine_id in self._leases.take_expired(now=self._clock()):
            log.info("engine_lease_ended", engine_id=engine_id)
            self.index.forget(engine_id)


async def sweep(index: PrefixIndex) -> None:
    """Free the memory of what the index has forgotten, letting others run in between."""
    while index.sweep(_SWEEP_KEYS):  # noqa: ASYNC110 - gives way, waits for nothing
        await asyncio.sleep(0)
