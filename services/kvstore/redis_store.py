"""What several copies of the index share in Redis or Valkey, as commands on keys.

Per engine, under the hash tag ``{engine_id}``: ``lease`` (its record, with a time to live), ``log``
(a stream of events, entry id ``<seq>-<n>``) and ``snap`` (everything held at one seq). Besides, one
set of engine_ids. No key per block, no scripts. An entry id that is not larger than the last is
refused by Redis itself: two writers cannot both append event n.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError, WatchError

from services.common.errors import Unavailable
from services.common.pb import kvstore_pb2 as pb
from services.kvstore.convert import (
    events_from_message,
    events_to_message,
    record_from_message,
    record_to_message,
)
from services.kvstore.events import EngineRecord, KvEvents

_PREFIX = "sluiceway:kv"
_ENGINES = f"{_PREFIX}:engines"
_EVENTS_FIELD = b"events"
_MARK_FIELD = b"snapshot"
_SNAPSHOT_HEAD = Struct("<QI")
_LENGTH = Struct("<I")
_KEPT_LEASES = 12
"""Log and snapshot outlive the lease by this factor, so that a publisher can come back to them."""

_TAIL_COUNT = 64


class LogBroken(Exception):
    """The log is not what its writer left: another has written, or Redis has lost it."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of a log.

    Attributes:
        position: Its id, to read on from.
        events: The event; ``None`` in a mark, which says that there is a newer snapshot.
    """

    position: str
    events: KvEvents | None


@dataclass(frozen=True, slots=True)
class Stored:
    """All that Redis has of an engine.

    Attributes:
        base_seq: What the snapshot contains; 0 = there is none.
        chunks: The snapshot.
        entries: The log, from its oldest entry that is kept.
    """

    base_seq: int = 0
    chunks: Sequence[KvEvents] = ()
    entries: Sequence[LogEntry] = field(default_factory=list)

    @property
    def last_seq(self) -> int:
        """The last event that was made durable."""
        seqs = [entry.events.seq for entry in self.entries if entry.events is not None]
        return max([self.base_seq, *seqs])

    @property
    def is_whole(self) -> bool:
        """Whether the snapshot and the log after it leave out nothing."""
        seqs = [entry.events.seq for entry in self.entries if entry.events is not None]
        later = [seq for seq in seqs if seq > self.base_seq]
        return later == list(range(self.base_seq + 1, self.base_seq + 1 + len(later)))

    @property
    def position(self) -> str:
        """Where to read on."""
        return self.entries[-1].position if self.entries else "0"


class RedisStore:
    """Commands of one copy of the index; every failure of Redis is ``Unavailable``."""

    def __init__(self, url: str, *, lease_s: float, timeout_s: float) -> None:
        """
        Args:
            url: ``redis://`` or ``valkey://`` with host, port, credentials and database.
            lease_s: Time to live of a lease, in seconds.
            timeout_s: Of connecting and of each command, in seconds.
        """
        self._lease_ms = int(lease_s * 1000)
        self._keep_s = max(int(lease_s * _KEPT_LEASES), 1)
        # Redis speaks for itself when it is away: nobody here waits for hidden retries.
        self._redis: Any = Redis.from_url(
            "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            # With protocol 3 redis-py expects notices of maintenance, and its pool then hands out
            # connections that Redis has closed.
            protocol=2,
            legacy_responses=False,  # XREAD answers with a dict, whatever the URL says
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def announce(self, record: EngineRecord) -> bool:
        """Take or renew an engine's lease.

        Returns:
            Whether its log exists.
        """
        engine_id = record.engine_id
        async with _translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.sadd(_ENGINES, engine_id)
            lease = record_to_message(record).SerializeToString()
            pipe.set(_key(engine_id, "lease"), lease, px=self._lease_ms)
            pipe.expire(_key(engine_id, "log"), self._keep_s)
            pipe.expire(_key(engine_id, "snap"), self._keep_s)
            _, _, has_log, _ = await pipe.execute()
        return bool(has_log)

    async def live_engines(self) -> dict[int, EngineRecord]:
        """The engines that have a lease; the others are taken off the list."""
        async with _translated():
            ids = sorted(int(member) for member in await self._redis.smembers(_ENGINES))
            async with self._redis.pipeline(transaction=False) as pipe:
                for engine_id in ids:
                    pipe.get(_key(engine_id, "lease"))
                leases = dict(zip(ids, await pipe.execute(), strict=True))
            lapsed = [engine_id for engine_id, lease in leases.items() if lease is None]
            if lapsed:
                await self._redis.srem(_ENGINES, *lapsed)
        return {
            engine_id: record_from_message(pb.EngineRecord.FromString(lease))
            for engine_id, lease in leases.items()
            if lease is not None
        }

    async def append(self, events: KvEvents) -> None:
        """Make an event durable.

        Raises:
            LogBroken: Somebody else has written it, or the log is lost.
        """
        raw = events_to_message(events).SerializeToString()
        log = _key(events.engine_id, "log")
        async with _translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.xadd(log, {_EVENTS_FIELD: raw}, id=f"{events.seq}-0", nomkstream=events.seq > 1)
            pipe.expire(log, self._keep_s)
            position, _ = await pipe.execute()
        if position is None:
            raise LogBroken

    async def write_snapshot(
        self, engine_id: int, base_seq: int, chunks: Sequence[KvEvents], *, is_news: bool
    ) -> None:
        """Replace an engine's snapshot and cut from the log what it contains.

        Args:
            engine_id: The engine.
            base_seq: What the chunks contain.
            chunks: Everything that the engine holds.
            is_news: Whether the other copies must read it, because the log alone does not lead
                there.

        Raises:
            LogBroken: Somebody else writes the log, or ``is_news`` and it is at or beyond
                ``base_seq`` already; nothing has been replaced.
        """
        log = _key(engine_id, "log")
        async with _translated(), self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(log)
            last = await pipe.xrevrange(log, count=1)
            if is_news and last and _order(last[0][0]) >= (base_seq, 1):
                raise LogBroken
            pipe.multi()
            pipe.set(_key(engine_id, "snap"), _pack(base_seq, chunks), ex=self._keep_s)
            if is_news:
                pipe.xadd(log, {_MARK_FIELD: b"1"}, id=f"{base_seq}-1")
            pipe.xtrim(log, minid=f"{base_seq}-0", approximate=False)
            pipe.expire(log, self._keep_s)
            await pipe.execute()

    async def load(self, engine_id: int) -> Stored:
        """Everything that there is of an engine."""
        async with _translated(), self._redis.pipeline(transaction=True) as pipe:
            pipe.get(_key(engine_id, "snap"))
            pipe.xrange(_key(engine_id, "log"))
            snap, log = await pipe.execute()
        base_seq, chunks = _unpack(snap) if snap else (0, [])
        return Stored(base_seq, chunks, [_entry(item) for item in log])

    async def tail(
        self, positions: Mapping[int, str], *, block_ms: int
    ) -> list[tuple[int, list[LogEntry]]]:
        """What has been appended to logs after these positions; waits a little for it."""
        names = {_key(engine_id, "log").encode(): engine_id for engine_id in positions}
        streams = {_key(engine_id, "log"): position for engine_id, position in positions.items()}
        async with _translated():
            found = await self._redis.xread(streams, count=_TAIL_COUNT, block=block_ms)
        return [(names[name], [_entry(item) for item in log]) for name, log in found.items()]

    async def remove(self, engine_id: int) -> None:
        """Forget an engine that has ended."""
        async with _translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.srem(_ENGINES, engine_id)
            pipe.delete(*(_key(engine_id, part) for part in ("lease", "log", "snap")))
            await pipe.execute()


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """Redis's own errors become ours, here and nowhere else."""
    try:
        yield
    except WatchError as error:
        raise LogBroken from error
    except ResponseError as error:
        if "equal or smaller" in str(error):
            raise LogBroken from error
        raise Unavailable(f"Redis refuses: {error}") from error
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"Redis cannot be reached: {error}") from error


def _key(engine_id: int, part: str) -> str:
    return f"{_PREFIX}:{{{engine_id}}}:{part}"


def _order(position: bytes) -> tuple[int, int]:
    seq, _, number = position.partition(b"-")
    return int(seq), int(number)


def _entry(item: tuple[bytes, Mapping[bytes, bytes]]) -> LogEntry:
    position, fields = item
    raw = fields.get(_EVENTS_FIELD)
    events = None if raw is None else events_from_message(pb.KvEvents.FromString(raw))
    return LogEntry(position.decode(), events)


def _pack(base_seq: int, chunks: Sequence[KvEvents]) -> bytes:
    raw = [events_to_message(chunk).SerializeToString() for chunk in chunks]
    head = _SNAPSHOT_HEAD.pack(base_seq, len(raw))
    return head + b"".join(_LENGTH.pack(len(part)) + part for part in raw)


def _unpack(packed: bytes) -> tuple[int, list[KvEvents]]:
    base_seq, num_chunks = _SNAPSHOT_HEAD.unpack_from(packed)
    chunks = []
    start = _SNAPSHOT_HEAD.size
    for _ in range(num_chunks):
        (length,) = _LENGTH.unpack_from(packed, start)
        start += _LENGTH.size
        chunks.append(events_from_message(pb.KvEvents.FromString(packed[start : start + length])))
        start += length
    return base_seq, chunks
