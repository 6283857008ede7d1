"""What every backend of the index does; ``memory`` is the reference."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from services.common.errors import ConfigError, InvalidRequest
from services.kvstore.backend import IndexBackend
from services.kvstore.config import KvStoreConfig
from services.kvstore.events import Ack, AckStatus, EngineRecord, KvEvents
from services.kvstore.memory_backend import MemoryBackend
from services.kvstore.open_backend import open_backend
from services.kvstore.redis_index import RedisBackend
from tests.unit.kvstore.keys import chunk, pack, record, stored
from tests.unit.kvstore.redis_server import RedisServer

Open = Callable[[], IndexBackend]


@pytest.fixture(params=["memory", "redis"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[IndexBackend]:
    if request.param == "memory":
        yield _open("memory://")
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    opened = _open(server.url)
    assert isinstance(opened, RedisBackend)
    yield opened
    await opened._store.close()


def _open(url: str) -> IndexBackend:
    config = KvStoreConfig(kv_index_url=url, lease_s=600, max_index_blocks=1_000)
    return open_backend(config, on_change=lambda: None)


async def _say(
    backend: IndexBackend, events: KvEvents, *, by: EngineRecord | None = None, stream: int = 0
) -> Ack:
    return await backend.publish(events, record=by or record(events.engine_id), stream=stream)


def _reach(backend: IndexBackend, numbers: list[int]) -> dict[int, int]:
    return {
        match.record.engine_id: max(match.num_blocks.values())
        for match in backend.index.match(pack(numbers))
    }


async def test_events_in_order_are_applied_and_acknowledged(backend: IndexBackend) -> None:
    assert await _say(backend, stored(1, 1, [1, 2])) == Ack(1, AckStatus.OK, seq=1)
    removal = KvEvents(1, 2, removed=pack([2]), stored=pack([3]))
    assert await _say(backend, removal) == Ack(1, AckStatus.OK, seq=2)
    assert _reach(backend, [1, 2]) == {1: 1}
    assert _reach(backend, [1, 3]) == {1: 2}


async def test_a_gap_needs_a_snapshot_which_mends_it(backend: IndexBackend) -> None:
    await _say(backend, stored(1, 1, [1]))
    assert await _say(backend, stored(1, 3, [3])) == Ack(1, AckStatus.NEED_SNAPSHOT, seq=1)
    first = chunk(1, [1, 2], base_seq=4, is_last=False)
    assert await _say(backend, first) == Ack(1, AckStatus.OK, seq=1)
    assert _reach(backend, [1, 2]) == {1: 1}
    last = chunk(1, [3], base_seq=4, number=1)
    assert await _say(backend, last) == Ack(1, AckStatus.OK, seq=4)
    assert _reach(backend, [1, 2, 3]) == {1: 3}
    assert await _say(backend, stored(1, 5, [4])) == Ack(1, AckStatus.OK, seq=5)


async def test_an_engine_that_is_not_known_from_its_first_event_needs_one(
    backend: IndexBackend,
) -> None:
    assert (await _say(backend, stored(1, 5, [1]))).status is AckStatus.NEED_SNAPSHOT
    assert (await _say(backend, chunk(1, [1], base_seq=6, number=2))) == Ack(
        1, AckStatus.NEED_SNAPSHOT
    )


async def test_what_is_sent_again_is_acknowledged_and_not_applied(backend: IndexBackend) -> None:
    await _say(backend, stored(1, 1, [1]))
    await _say(backend, KvEvents(1, 2, removed=pack([1])))
    assert await _say(backend, stored(1, 1, [1]), stream=1) == Ack(1, AckStatus.OK, seq=2)
    assert _reach(backend, [1]) == {}


async def test_a_snapshot_that_is_sent_again_changes_nothing(backend: IndexBackend) -> None:
    await _say(backend, chunk(1, [1], base_seq=4))
    await _say(backend, stored(1, 5, [2]))
    assert await _say(backend, chunk(1, [1], base_seq=4), stream=1) == Ack(1, AckStatus.OK, seq=5)
    assert _reach(backend, [1, 2]) == {1: 2}


async def test_a_snapshot_whose_answer_was_lost_is_acknowledged_again(
    backend: IndexBackend,
) -> None:
    await _say(backend, chunk(1, [1], base_seq=4))
    assert await _say(backend, chunk(1, [1], base_seq=4), stream=1) == Ack(1, AckStatus.OK, seq=4)
    assert await _say(backend, stored(1, 5, [2]), stream=1) == Ack(1, AckStatus.OK, seq=5)
    assert _reach(backend, [1, 2]) == {1: 2}


async def test_an_older_engine_of_a_worker_is_fenced(backend: IndexBackend) -> None:
    await _say(backend, stored(2, 1, [1]), by=record(2, worker_id="w"))
    late = await _say(backend, stored(1, 1, [1]), by=record(1, worker_id="w"))
    assert late == Ack(1, AckStatus.FENCED, seen_engine_id=2)
    assert _reach(backend, [1]) == {2: 1}


async def test_an_engine_that_has_gone_is_forgotten(backend: IndexBackend) -> None:
    await _say(backend, stored(1, 1, [1]))
    assert await _say(backend, KvEvents(1, 2, is_gone=True)) == Ack(1, AckStatus.OK, seq=2)
    assert backend.index.engines() == []


async def test_an_engine_survives_the_end_of_its_stream_for_a_while(backend: IndexBackend) -> None:
    await _say(backend, stored(1, 1, [1]), stream=0)
    backend.end_stream(0)
    assert await _say(backend, stored(1, 2, [2]), stream=1) == Ack(1, AckStatus.OK, seq=2)
    assert _reach(backend, [1, 2]) == {1: 2}


async def test_malformed_keys_are_refused_and_the_engine_goes_on(backend: IndexBackend) -> None:
    await _say(backend, stored(1, 1, [1]))
    with pytest.raises(InvalidRequest, match="stored holds 5 bytes"):
        await _say(backend, KvEvents(1, 2, stored=b"short"))
    assert await _say(backend, stored(1, 2, [2])) == Ack(1, AckStatus.OK, seq=2)


async def test_an_engine_beyond_the_bound_is_acknowledged_without_its_blocks(
    backend: IndexBackend,
) -> None:
    big = record(1, num_blocks=2_000)
    assert await _say(backend, stored(1, 1, [1]), by=big) == Ack(1, AckStatus.OK, seq=1)
    assert await _say(backend, stored(1, 2, [2]), by=big) == Ack(1, AckStatus.OK, seq=2)
    assert [entry.is_indexed for entry in backend.index.engines()] == [False]


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory://", MemoryBackend),
        ("redis://127.0.0.1:1/3", RedisBackend),
        ("valkey://127.0.0.1:1", RedisBackend),
    ],
)
async def test_the_url_names_the_backend(url: str, kind: type) -> None:
    assert isinstance(_open(url), kind)


@pytest.mark.parametrize("url", ["ftp://x", "memory", "redis://host:port"])
async def test_a_bad_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="kv_index_url"):
        _open(url)
