"""``redis://`` and ``valkey://``: copies of the index that share what their publishers say.

The copy that a publisher is connected to writes each event to the engine's log and acknowledges it
then; every copy follows the logs of all live engines and answers from memory. A lease that ends is
the engine's end everywhere. While Redis cannot be reached, the last known state answers, marked
degraded, and nothing lapses. No match ever waits for Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.block_hash import KEY_SIZE_BYTES
from services.common.errors import InvalidRequest, Unavailable
from services.common.telemetry import get_logger
from services.kvstore.events import (
    Ack,
    AckStatus,
    EngineRecord,
    KvEvents,
    SnapshotChunk,
    check_keys,
)
from services.kvstore.index import PrefixIndex
from services.kvstore.leases import Leases
from services.kvstore.memory_backend import sweep
from services.kvstore.redis_store import LogBroken, LogEntry, RedisStore, Stored

SNAPSHOT_CHUNK_KEYS = 65_536
_TICKS_PER_LEASE = 5
_TAIL_BLOCK_MS = 250
_RETRY_S = 0.5
_COMPACT_MIN_COST = 65_536
_ENTRY_COST = 8

log = get_logger(__name__)


@dataclass(slots=True)
class _Writer:
    """The end of an engine's log, as the copy that writes it knows it.

    Attributes:
        record: The engine.
        stream: The publisher's stream that this copy writes for.
        last_seq: The last event in the log.
        is_whole: Whether snapshot and log together are complete; else a snapshot is needed.
        cost: Roughly the keys in the log since its last snapshot.
        part: Chunks of a snapshot that is still coming.
    """

    record: EngineRecord
    stream: int
    last_seq: int
    is_whole: bool
    cost: int
    part: list[KvEvents]


class RedisBackend:
    """One copy of an index that lives in Redis or Valkey.

    Attributes:
        index: What matches are answered from.
    """

    def __init__(
        self,
        index: PrefixIndex,
        store: RedisStore,
        *,
        lease_s: float,
        max_blocks: int,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        """
        Args:
            index: An empty index.
            store: The shared store.
            lease_s: How long an engine outlives its publisher's stream, in seconds.
            max_blocks: No snapshot may have more keys.
            clock: Monotonic time in seconds.
            on_change: Called when ``is_degraded`` has changed.
        """
        self.index = index
        self._store = store
        self._lease_s = lease_s
        self._max_blocks = max_blocks
        self._clock = clock
        self._on_change = on_change
        self._leases = Leases(lease_s=lease_s)
        self._writers: dict[int, _Writer] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._positions: dict[int, str] = {}
        self._records: dict[int, EngineRecord] = {}
        self._is_degraded = True
        self._may_lapse_from = 0.0

    @property
    def is_degraded(self) -> bool:
        """See ``IndexBackend``."""
        return self._is_degraded

    async def publish(self, events: KvEvents, *, record: EngineRecord, stream: int) -> Ack:
        """See ``IndexBackend``."""
        check_keys(events)
        fence = self.index.fence(events, record=record)
        if fence is not None:
            self._let_go(events.engine_id)
            return fence
        if events.is_gone:
            return await self._remove(events)
        self._leases.hold(events.engine_id, stream=stream)
        async with self._lock(events.engine_id):
            try:
                writer = await self._writer(record, stream=stream)
                return await self._write(writer, events)
            except LogBroken:
                # Another copy has written on, or the log is lost: look again before the next event.
                self._writers.pop(events.engine_id, None)
                return self._need_snapshot(events.engine_id)
            except Unavailable:
                self._writers.pop(events.engine_id, None)
                self._set_degraded(True)
                raise

    def end_stream(self, stream: int) -> None:
        """See ``IndexBackend``."""
        self._leases.end_stream(stream, now=self._clock())
        for engine_id, writer in list(self._writers.items()):
            if writer.stream == stream:
                del self._writers[engine_id]

    async def run(self) -> None:
        """Renew leases, follow the logs, free memory."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_house())
                tasks.create_task(self._follow_logs())
        finally:
            await self._store.close()

    # Writing

    async def _writer(self, record: EngineRecord, *, stream: int) -> _Writer:
        """The end of the engine's log; read from Redis once per stream."""
        writer = self._writers.get(record.engine_id)
        if writer is not None and writer.stream == stream:
            if writer.record != record:
                writer.record = record
                await self._store.announce(record)
            return writer
        await self._store.announce(record)
        stored = await self._store.load(record.engine_id)
        self._take_in(record, stored)
        writer = self._writers[record.engine_id] = _Writer(
            record=record,
            stream=stream,
            last_seq=stored.last_seq,
            is_whole=stored.is_whole,
            cost=_ENTRY_COST * len(stored.entries),
            part=[],
        )
        return writer

    async def _write(self, writer: _Writer, events: KvEvents) -> Ack:
        if events.snapshot is not None:
            return await self._write_chunk(writer, events, events.snapshot)
        if not writer.is_whole or events.seq > writer.last_seq + 1:
            return self._answer(writer, AckStatus.NEED_SNAPSHOT)
        if events.seq == writer.last_seq + 1:
            await self._store.append(events)
            writer.last_seq = events.seq
            writer.cost += _ENTRY_COST + _num_keys(events)
            self._apply(writer.record, events)
            await self._compact_if_long(writer)
        return self._answer(writer, AckStatus.OK)

    async def _write_chunk(self, writer: _Writer, events: KvEvents, part: SnapshotChunk) -> Ack:
        """Collect a snapshot; write it once it is whole."""
        if part.chunk == 0:
            writer.part = []
        if not _continues(writer.part, part):
            writer.part = []
            return self._answer(writer, AckStatus.NEED_SNAPSHOT)
        writer.part.append(events)
        if sum(map(_num_keys, writer.part)) > self._max_blocks:
            writer.part = []
            raise InvalidRequest(
                f"the snapshot of engine {events.engine_id} has more than {self._max_blocks} keys",
                param="stored",
            )
        if part.is_last:
            chunks, writer.part = writer.part, []
            await self._write_snapshot(writer, part.base_seq, chunks)
        return self._answer(writer, AckStatus.OK)

    async def _write_snapshot(
        self, writer: _Writer, base_seq: int, chunks: Sequence[KvEvents]
    ) -> None:
        if writer.is_whole and base_seq <= writer.last_seq:
            return  # sent again, or before events that have been written meanwhile
        engine_id = writer.record.engine_id
        await self._store.write_snapshot(engine_id, base_seq, chunks, is_news=True)
        writer.last_seq, writer.is_whole, writer.cost = base_seq, True, 0
        for chunk in chunks:
            self._apply(writer.record, chunk)

    async def _compact_if_long(self, writer: _Writer) -> None:
        """Put a snapshot in place of a log that has become longer than what it leads to."""
        engine_id = writer.record.engine_id
        keys = self.index.engine(engine_id)
        num_keys = keys.num_keys if keys is not None else 0
        if writer.cost <= max(_COMPACT_MIN_COST, num_keys):
            return
        if keys is None or not keys.is_indexed or keys.seq != writer.last_seq:
            writer.is_whole = False  # nobody here knows the state: the publisher does
            return
        chunks = snapshot_chunks(engine_id, keys.seq, keys.snapshot())
        await self._store.write_snapshot(engine_id, keys.seq, chunks, is_news=False)
        writer.cost = 0

    async def _remove(self, events: KvEvents) -> Ack:
        async with self._lock(events.engine_id):
            self._let_go(events.engine_id)
            self._forget(events.engine_id)
            try:
                await self._store.remove(events.engine_id)
            except Unavailable:
                self._set_degraded(True)
                raise
        return Ack(events.engine_id, AckStatus.OK, seq=events.seq)

    def _answer(self, writer: _Writer, status: AckStatus) -> Ack:
        return Ack(writer.record.engine_id, status, seq=writer.last_seq)

    def _need_snapshot(self, engine_id: int) -> Ack:
        keys = self.index.engine(engine_id)
        return Ack(engine_id, AckStatus.NEED_SNAPSHOT, seq=keys.seq if keys is not None else 0)

    # Following

    async def _follow_logs(self) -> None:
        while True:
            try:
                await self.follow()
            except Unavailable as error:
                self._set_degraded(True, reason=error.message)
                await asyncio.sleep(_RETRY_S)

    async def follow(self) -> None:
        """Apply what has been appended to the logs of live engines; waits a little for it.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        if not self._positions:
            await asyncio.sleep(_TAIL_BLOCK_MS / 1000)
            return
        news = await self._store.tail(self._positions, block_ms=_TAIL_BLOCK_MS)
        for engine_id, entries in news:
            await self._follow(engine_id, entries)

    async def _follow(self, engine_id: int, entries: Sequence[LogEntry]) -> None:
        """Apply what another copy (or this one) has appended."""
        for entry in entries:
            record = self._records.get(engine_id)
            if record is None:
                return  # forgotten while its log was read
            self._positions[engine_id] = entry.position
            if entry.events is None or self._apply(record, entry.events) is not AckStatus.OK:
                self._take_in(record, await self._store.load(engine_id))
                return
            await asyncio.sleep(0)  # a match may have its turn between two entries

    def _take_in(self, record: EngineRecord, stored: Stored) -> None:
        """Bring the index to what Redis has of an engine."""
        self._records[record.engine_id] = record
        self._positions[record.engine_id] = stored.position
        keys = self.index.engine(record.engine_id)
        if keys is None or not keys.is_indexed or keys.seq < stored.base_seq:
            for chunk in stored.chunks:
                self._apply(record, chunk)
        for entry in stored.entries:
            if entry.events is not None:
                self._apply(record, entry.events)

    def _apply(self, record: EngineRecord, events: KvEvents) -> AckStatus:
        try:
            return self.index.apply(events, record=record).status
        except InvalidRequest as error:  # too many tiers: no reason for every copy to die
            log.warning("event_refused", engine_id=events.engine_id, error=error.message)
            return AckStatus.OK

    # Housekeeping

    async def _keep_house(self) -> None:
        while True:
            try:
                await self.tick()
            except Unavailable as error:
                self._set_degraded(True, reason=error.message)
            await sweep(self.index)
            await asyncio.sleep(self._lease_s / _TICKS_PER_LEASE)

    async def tick(self) -> None:
        """Renew the leases of this copy's publishers; find new engines; forget those that ended.

        Raises:
            Unavailable: Redis cannot be reached; nothing has been forgotten.
        """
        self._leases.take_expired(now=self._clock())
        for engine_id in list(self._writers):
            await self._renew(engine_id)
        live = await self._store.live_engines()
        self._set_degraded(False)
        for engine_id, record in live.items():
            await self._meet(engine_id, record)
        if self._clock() >= self._may_lapse_from:
            for engine_id in set(self._records) - set(live) - set(self._leases.held()):
                log.info("engine_lease_ended", engine_id=engine_id)
                self._forget(engine_id)

    async def _renew(self, engine_id: int) -> None:
        async with self._lock(engine_id):  # else an engine that goes meanwhile would be announced
            writer = self._writers.get(engine_id)
            if writer is None:
                return
            if not await self._store.announce(writer.record) and writer.last_seq > 0:
                writer.is_whole = False  # Redis has lost the log; the publisher gives a snapshot

    async def _meet(self, engine_id: int, record: EngineRecord) -> None:
        """Begin to follow an engine, or take note of its new record."""
        greeting = KvEvents(engine_id)
        if self.index.fence(greeting, record=record) is not None:
            self._forget(engine_id)
        elif self._records.get(engine_id) != record:
            self._take_in(record, await self._store.load(engine_id))
            self._apply(record, greeting)

    def _lock(self, engine_id: int) -> asyncio.Lock:
        """Held by whoever writes an engine's keys in Redis."""
        return self._locks.setdefault(engine_id, asyncio.Lock())

    def _forget(self, engine_id: int) -> None:
        self._records.pop(engine_id, None)
        self._positions.pop(engine_id, None)
        self._locks.pop(engine_id, None)
        self.index.forget(engine_id)

    def _let_go(self, engine_id: int) -> None:
        self._leases.forget(engine_id)
        self._writers.pop(engine_id, None)

    def _set_degraded(self, is_degraded: bool, *, reason: str = "") -> None:
        if is_degraded == self._is_degraded:
            return
        self._is_degraded = is_degraded
        if is_degraded:
            log.warning("index_degraded", reason=reason)
        else:
            # Leases ended while nobody could renew them: their holders get time to do so.
            self._may_lapse_from = self._clock() + self._lease_s
            log.info("index_recovered")
        self._on_change()


def snapshot_chunks(
    engine_id: int, base_seq: int, places: dict[tuple[str, int], set[bytes]]
) -> list[KvEvents]:
    """An engine's keys as the chunks of a snapshot; at least one."""
    pieces = [
        (place, ordered[start : start + SNAPSHOT_CHUNK_KEYS])
        for place, keys in (places or {("", 0): set()}).items()
        for ordered in [list(keys)]
        for start in range(0, max(len(ordered), 1), SNAPSHOT_CHUNK_KEYS)
    ]
    return [
        KvEvents(
            engine_id,
            base_seq,
            stored=b"".join(keys),
            tier=tier,
            group=group,
            snapshot=SnapshotChunk(base_seq, number, number == len(pieces) - 1),
        )
        for number, ((tier, group), keys) in enumerate(pieces)
    ]


def _continues(part: Sequence[KvEvents], chunk: SnapshotChunk) -> bool:
    base_seq = chunk.base_seq
    if part:
        assert part[0].snapshot is not None
        base_seq = part[0].snapshot.base_seq
    return (chunk.chunk, chunk.base_seq) == (len(part), base_seq)


def _num_keys(events: KvEvents) -> int:
    return (len(events.stored) + len(events.removed)) // KEY_SIZE_BYTES
