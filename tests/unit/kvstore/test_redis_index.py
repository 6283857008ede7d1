"""Several copies of the index over one real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from services.common.errors import Unavailable
from services.kvstore import redis_index
from services.kvstore.config import KvStoreConfig
from services.kvstore.events import Ack, AckStatus, KvEvents
from services.kvstore.open_backend import open_backend
from services.kvstore.redis_index import RedisBackend, snapshot_chunks
from tests.unit.kvstore.keys import chunk, pack, record, stored
from tests.unit.kvstore.redis_server import RedisServer

LEASE_KEY = "sluiceway:kv:{1}:lease"
LOG_KEY = "sluiceway:kv:{1}:log"


class Copies:
    """Copies of the index, and Redis as it really is."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self._opened: list[RedisBackend] = []
        # Untyped: redis-py's stubs mix the answers of its synchronous and asynchronous clients.
        self.redis: Any = Redis.from_url(server.url)

    def open(self, *, lease_s: float = 600) -> RedisBackend:
        """Another copy."""
        # The lease is long: where one is to end, the test ends it, however slow the machine.
        config = KvStoreConfig(kv_index_url=self.server.url, lease_s=lease_s)
        backend = open_backend(config, on_change=lambda: None)
        assert isinstance(backend, RedisBackend)
        self._opened.append(backend)
        return backend

    async def close(self) -> None:
        """Close all connections."""
        for backend in self._opened:
            await backend._store.close()
        await self.redis.aclose()


@pytest.fixture
async def copies(redis_server: RedisServer) -> AsyncIterator[Copies]:
    copies = Copies(redis_server)
    yield copies
    await copies.close()


async def _say(backend: RedisBackend, events: KvEvents, *, stream: int = 0) -> Ack:
    return await backend.publish(events, record=record(events.engine_id), stream=stream)


def _reach(backend: RedisBackend, numbers: list[int]) -> int:
    matches = backend.index.match(pack(numbers))
    return max((max(match.num_blocks.values()) for match in matches), default=0)


async def test_what_one_copy_is_told_another_answers(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    await other.tick()
    assert _reach(other, [1]) == 1
    await _say(one, stored(1, 2, [2]))
    await other.follow()
    assert _reach(other, [1, 2]) == 2
    assert other.index.engines() == one.index.engines()


async def test_a_publisher_that_changes_its_copy_goes_on_without_a_snapshot(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    await _say(one, stored(1, 2, [2]))
    one.end_stream(0)
    assert await _say(other, stored(1, 3, [3])) == Ack(1, AckStatus.OK, seq=3)
    assert _reach(other, [1, 2, 3]) == 3
    other.end_stream(0)
    assert await _say(one, stored(1, 4, [4]), stream=9) == Ack(1, AckStatus.OK, seq=4)
    assert _reach(one, [1, 2, 3, 4]) == 4


async def test_two_copies_cannot_both_write_the_same_event(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    await _say(other, stored(1, 2, [2]))
    assert (await _say(one, stored(1, 2, [9]))).status is AckStatus.NEED_SNAPSHOT
    assert await copies.redis.xlen(LOG_KEY) == 2


async def test_a_snapshot_reaches_the_other_copies(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    await other.tick()
    await _say(one, chunk(1, [5], base_seq=8, is_last=False))
    await _say(one, chunk(1, [6], base_seq=8, number=1))
    await other.follow()
    assert (_reach(other, [1]), _reach(other, [5, 6])) == (0, 2)
    await _say(one, stored(1, 9, [7]))
    await other.follow()
    assert _reach(other, [5, 6, 7]) == 3


async def test_a_snapshot_that_comes_too_late_replaces_nothing(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    await _say(other, chunk(1, [5], base_seq=8))
    assert (await _say(one, chunk(1, [9], base_seq=4))).status is AckStatus.NEED_SNAPSHOT
    later = copies.open()
    await later.tick()
    assert (_reach(later, [5]), _reach(later, [9])) == (1, 0)


async def test_a_copy_that_starts_later_reads_snapshot_and_log(copies: Copies) -> None:
    one = copies.open()
    await _say(one, chunk(1, [1, 2], base_seq=4))
    await _say(one, stored(1, 5, [3]))
    later = copies.open()
    await later.tick()
    assert _reach(later, [1, 2, 3]) == 3
    assert later.index.engines() == one.index.engines()


async def test_a_long_log_becomes_a_snapshot(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_index, "_COMPACT_MIN_COST", 50)
    one = copies.open()
    for seq in range(1, 31):
        assert (await _say(one, stored(1, seq, [seq]))).status is AckStatus.OK
    assert await copies.redis.xlen(LOG_KEY) < 10
    later = copies.open()
    await later.tick()
    assert _reach(later, list(range(1, 31))) == 30
    await _say(one, stored(1, 31, [31]))
    await later.follow()
    assert _reach(later, list(range(1, 32))) == 31


async def test_a_copy_that_has_missed_what_was_cut_reads_the_snapshot(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, slow = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    await slow.tick()
    monkeypatch.setattr(redis_index, "_COMPACT_MIN_COST", 10)
    for seq in range(2, 9):
        await _say(one, stored(1, seq, [seq]))
    await slow.follow()
    assert _reach(slow, list(range(1, 9))) == 8


async def test_there_is_no_key_per_block(copies: Copies) -> None:
    one = copies.open()
    await _say(one, stored(1, 1, range(1000)))
    await _say(one, chunk(1, range(2000), base_seq=2))
    assert await copies.redis.dbsize() == 4


async def test_an_engine_that_has_gone_leaves_nothing(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    await other.tick()
    other._may_lapse_from = 0.0
    await _say(one, KvEvents(1, 2, is_gone=True))
    assert await copies.redis.dbsize() == 0
    await other.tick()
    assert other.index.engines() == []


async def test_an_engine_whose_lease_has_ended_is_forgotten_by_all(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    await one.tick()
    await other.tick()
    one._may_lapse_from = other._may_lapse_from = 0.0
    one.end_stream(0)
    await copies.redis.delete(LEASE_KEY)
    for backend in (one, other):
        await backend.tick()
        assert backend.index.engines() == []
    assert await copies.redis.smembers("sluiceway:kv:engines") == set()


async def test_a_lease_is_renewed_while_its_publisher_is_connected(copies: Copies) -> None:
    one = copies.open()
    await _say(one, stored(1, 1, [1]))
    await copies.redis.pexpire(LEASE_KEY, 100_000)
    await one.tick()
    assert await copies.redis.pttl(LEASE_KEY) > 100_000
    one.end_stream(0)
    await copies.redis.pexpire(LEASE_KEY, 100_000)
    await one.tick()
    assert await copies.redis.pttl(LEASE_KEY) <= 100_000


async def test_every_key_of_an_engine_ends_by_itself(copies: Copies) -> None:
    one = copies.open()
    await _say(one, stored(1, 1, [1]))
    await _say(one, chunk(1, [1], base_seq=2))
    await one.tick()
    for part in ("lease", "log", "snap"):
        assert await copies.redis.pttl(f"sluiceway:kv:{{1}}:{part}") > 0


async def test_a_newer_engine_at_one_copy_voids_the_older_at_another(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await one.publish(stored(1, 1, [1]), record=record(1, worker_id="w"), stream=0)
    await other.tick()
    await one.publish(stored(2, 1, [2]), record=record(2, worker_id="w"), stream=0)
    await other.tick()
    assert (_reach(other, [1]), _reach(other, [2])) == (0, 1)
    late = await other.publish(stored(1, 2, [3]), record=record(1, worker_id="w"), stream=0)
    assert late == Ack(1, AckStatus.FENCED, seen_engine_id=2)


async def test_without_redis_the_last_known_answers_degraded_and_nothing_lapses(
    copies: Copies,
) -> None:
    one = copies.open()
    await _say(one, stored(1, 1, [1]))
    await one.tick()
    assert not one.is_degraded
    copies.server.stop()
    with pytest.raises(Unavailable):
        await _say(one, stored(1, 2, [2]))
    one.end_stream(0)
    with pytest.raises(Unavailable):
        await one.tick()
    assert one.is_degraded
    assert _reach(one, [1]) == 1


async def test_when_redis_comes_back_empty_the_publisher_fills_it_again(copies: Copies) -> None:
    one, other = copies.open(), copies.open()
    await _say(one, stored(1, 1, [1]))
    for backend in (one, other):
        await backend.tick()
    copies.server.stop()
    with pytest.raises(Unavailable):
        await _say(one, stored(1, 2, [2]))
    copies.server.start()
    for backend in (one, other):
        await backend.tick()
        assert not backend.is_degraded
        assert _reach(backend, [1]) == 1
    assert (await _say(one, stored(1, 2, [2]))).status is AckStatus.NEED_SNAPSHOT
    assert await _say(one, chunk(1, [1, 2], base_seq=3)) == Ack(1, AckStatus.OK, seq=3)
    await other.tick()
    await other.follow()
    assert _reach(other, [1, 2]) == 2


async def test_a_log_that_redis_lost_while_nobody_wrote_is_noticed(copies: Copies) -> None:
    one = copies.open()
    await _say(one, stored(1, 1, [1]))
    await copies.redis.flushall()
    await one.tick()
    assert (await _say(one, stored(1, 2, [2]))).status is AckStatus.NEED_SNAPSHOT


async def test_running_copies_follow_each_other_until_the_publisher_has_gone(
    copies: Copies,
) -> None:
    one, other = copies.open(lease_s=2), copies.open(lease_s=2)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(backend.run()) for backend in (one, other)]
        await _say(one, stored(1, 1, [1]))
        await _say(one, stored(1, 2, [2]))
        while _reach(other, [1, 2]) < 2:
            await asyncio.sleep(0.02)
        one.end_stream(0)
        while one.index.engines() or other.index.engines():
            await asyncio.sleep(0.02)
        for task in running:
            task.cancel()


async def test_it_starts_without_redis(copies: Copies) -> None:
    copies.server.stop()
    one = copies.open()
    assert one.is_degraded
    with pytest.raises(Unavailable):
        await one.tick()
    copies.server.start()
    await one.tick()
    assert not one.is_degraded


@pytest.mark.parametrize("places", [{}, {("", 0): {b"a" * 16}, ("host", 1): {b"b" * 16}}])
def test_chunks_of_a_snapshot_hold_everything(
    places: dict[tuple[str, int], set[bytes]],
) -> None:
    chunks = snapshot_chunks(1, 7, places)
    assert {(c.tier, c.group): {c.stored} for c in chunks if c.stored} == places
    parts = [c.snapshot for c in chunks]
    assert [p.chunk for p in parts if p] == list(range(len(chunks)))
    assert [p.is_last for p in parts if p] == [False] * (len(chunks) - 1) + [True]
