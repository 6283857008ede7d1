"""The index hears of blocks, and whatever it does delays no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from services.common.block_hash import block_keys, root_key
from services.common.pb import kvstore_pb2 as pb
from services.common.pb import kvstore_pb2_grpc
from services.common.rpc import RpcServer
from services.scheduler import kv_events
from services.scheduler.config import SchedulerConfig
from services.scheduler.kv_events import KvPublisher
from services.scheduler.kv_feed import EngineCard
from services.scheduler.service import open_scheduler
from tests.fakes.worker import FakeWorkerSpec, expected_output
from tests.unit.scheduler.conftest import Stage

CARD = EngineCard(
    engine_id=5,
    worker_id="w",
    scheduler_address="a:1",
    model="m",
    text_fp="t",
    kv_fp="k",
    block_size=4,
    num_blocks=9,
)


class Index(kvstore_pb2_grpc.KvStoreServicer):
    """Applies what comes if it is contiguous, as the real one does.

    Attributes:
        keys: engine_id -> keys.
        records: engine_id -> who it is.
        gone: Engines that have ended.
        answers: Cleared = nothing is acknowledged.
        fences: Answer everything with FENCED.
    """

    def __init__(self) -> None:
        self.keys: dict[int, set[bytes]] = {}
        self.seqs: dict[int, int] = {}
        self.records: dict[int, pb.EngineRecord] = {}
        self.gone: set[int] = set()
        self.num_messages = 0
        self.num_streams = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.fences = False
        self.changed = asyncio.Event()

    async def Publish(
        self, request_iterator: AsyncIterator[pb.KvEvents], context: object
    ) -> AsyncIterator[pb.KvAck]:
        """See kvstore.proto."""
        self.num_streams += 1
        async for message in request_iterator:
            self.num_messages += 1
            ack = self._apply(message)
            self.changed.set()
            await self.answers.wait()
            yield ack

    async def holds(self, engine_id: int, keys: set[bytes]) -> None:
        """Wait until an engine is known to hold exactly these keys."""
        async with asyncio.timeout(60):
            while self.keys.get(engine_id) != keys:
                self.changed.clear()
                await self.changed.wait()

    async def until_gone(self, engine_id: int) -> None:
        """Wait until an engine is known to have ended."""
        async with asyncio.timeout(60):
            while engine_id not in self.gone:
                self.changed.clear()
                await self.changed.wait()

    def _apply(self, message: pb.KvEvents) -> pb.KvAck:
        engine_id = message.engine_id
        if message.HasField("record"):
            self.records[engine_id] = message.record
        assert engine_id in self.records
        if self.fences:
            return pb.KvAck(engine_id=engine_id, status=pb.KV_ACK_STATUS_FENCED, seen_engine_id=9)
        seq = self.seqs.get(engine_id, 0)
        if message.gone:
            self.gone.add(engine_id)
        elif message.HasField("snapshot"):
            assert message.snapshot.last
            self.keys[engine_id] = unpacked(message.stored)
            self.seqs[engine_id] = message.snapshot.base_seq
        elif message.seq > seq + 1:
            return pb.KvAck(engine_id=engine_id, status=pb.KV_ACK_STATUS_NEED_SNAPSHOT, seq=seq)
        elif message.seq == seq + 1:
            held = self.keys.setdefault(engine_id, set())
            if message.cleared:
                held.clear()
            held -= unpacked(message.removed)
            held |= unpacked(message.stored)
            self.seqs[engine_id] = message.seq
        return pb.KvAck(engine_id=engine_id, status=pb.KV_ACK_STATUS_OK, seq=message.seq)


def unpacked(packed: bytes) -> set[bytes]:
    return {packed[i : i + 16] for i in range(0, len(packed), 16)}


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@asynccontextmanager
async def serving(index: Index, *, port: int = 0) -> AsyncIterator[str]:
    server = RpcServer(host="127.0.0.1", port=port, cluster_token=None)
    server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, index, "sluiceway.v1.KvStore")
    try:
        yield await server.start()
    finally:
        await server.stop(grace_s=0)


@asynccontextmanager
async def publishing(*addresses: str) -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher(addresses, cluster_token=None)
    async with asyncio.TaskGroup() as tasks:
        runner = tasks.create_task(publisher.run())
        yield publisher
        runner.cancel()


@asynccontextmanager
async def frozen_peer() -> AsyncIterator[str]:
    """A process that accepts connections and never reads or writes."""
    release = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        release.set()
        server.close()
        await server.wait_closed()


async def test_the_index_hears_what_is_stored_removed_and_cleared() -> None:
    index = Index()
    held = {key(1)}
    async with serving(index) as address, publishing(address) as publisher:
        publisher.engine_up(CARD, published_keys=lambda: b"".join(held))
        publisher.publish(5, stored=[key(1), key(2)], removed=[])
        await index.holds(5, {key(1), key(2)})
        publisher.publish(5, stored=[key(3)], removed=[key(1)])
        await index.holds(5, {key(2), key(3)})
        publisher.publish(5, stored=[key(4)], removed=[], is_cleared=True)
        await index.holds(5, {key(4)})
        assert index.records[5].worker_id == "w"
        publisher.engine_down(5)
        await index.until_gone(5)


async def test_what_changes_soon_after_a_message_goes_together_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "NEWS_PERIOD_S", 0.5)
    index = Index()
    async with serving(index) as address, publishing(address) as publisher:
        publisher.engine_up(CARD, published_keys=bytes)
        publisher.publish(5, stored=[key(0)], removed=[])
        await index.holds(5, {key(0)})
        for number in range(1, 20):
            publisher.publish(5, stored=[key(number)], removed=[])
            await asyncio.sleep(0.001)
        await index.holds(5, {key(number) for number in range(20)})
        assert index.num_messages <= 3


async def test_the_end_of_an_engine_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "NEWS_PERIOD_S", 3_600)
    index = Index()
    async with serving(index) as address, publishing(address) as publisher:
        publisher.engine_up(CARD, published_keys=bytes)
        publisher.publish(5, stored=[key(0)], removed=[])
        await index.holds(5, {key(0)})
        publisher.engine_down(5)
        await index.until_gone(5)


async def test_an_index_that_was_restarted_is_told_everything_again() -> None:
    held = {key(1), key(2)}
    async with AsyncExitStack() as stack:
        first = Index()
        async with serving(first) as address:
            publisher = await stack.enter_async_context(publishing(address))
            publisher.engine_up(CARD, published_keys=lambda: b"".join(held))
            publisher.publish(5, stored=held, removed=[])
            await first.holds(5, held)
        second = Index()
        async with serving(second, port=int(address.rpartition(":")[2])):
            await second.holds(5, held)


async def test_an_index_that_answers_nothing_is_given_up_and_dialled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "ANSWER_TIMEOUT_S", 0.5)
    index = Index()
    index.answers.clear()
    async with serving(index) as address, publishing(address) as publisher:
        publisher.engine_up(CARD, published_keys=lambda: key(1))
        publisher.publish(5, stored=[key(1)], removed=[])
        async with asyncio.timeout(60):
            while index.num_streams < 2:
                index.changed.clear()
                await index.changed.wait()
        index.answers.set()
        publisher.publish(5, stored=[key(2)], removed=[])
        await index.holds(5, {key(1), key(2)})


async def test_a_fenced_engine_publishes_no_more() -> None:
    index = Index()
    index.fences = True
    async with serving(index) as address, publishing(address) as publisher:
        publisher.engine_up(CARD, published_keys=bytes)
        async with asyncio.timeout(60):
            while not publisher._feeds[5].is_fenced:
                await asyncio.sleep(0.01)
        other = EngineCard(6, "x", "a:1", "m", "t", "k", block_size=4, num_blocks=9)
        index.fences = False
        publisher.engine_up(other, published_keys=bytes)
        publisher.publish(6, stored=[key(1)], removed=[])
        await index.holds(6, {key(1)})
        num_messages = index.num_messages
        publisher.publish(5, stored=[key(7)], removed=[])
        publisher.publish(6, stored=[key(2)], removed=[])
        await index.holds(6, {key(1), key(2)})
        assert 5 not in index.keys
        assert index.num_messages == num_messages + 1


async def test_blocks_of_served_requests_are_published_with_the_keys_of_their_tokens() -> None:
    index = Index()
    async with serving(index) as address:
        config = SchedulerConfig(port=0, http_port=0, kvstores=(address,))
        async with (
            open_scheduler(config) as scheduler,
            asyncio.TaskGroup() as tasks,
            AsyncExitStack() as stack,
        ):
            stage = Stage(scheduler, stack, tasks)
            worker, client = await stage.pair()
            prompt = list(range(1, 14))
            (handle,) = client.add(prompt)
            await client.finished(handle)
            known = prompt + expected_output(prompt, 3)
            keys = block_keys(root_key("fake-revision"), known, block_size=4)
            await index.holds(worker.engine_id, set(keys))
            record = index.records[worker.engine_id]
            assert (record.block_size, record.scheduler_address) == (4, scheduler.address)
            await worker.die()
            await index.until_gone(worker.engine_id)
            stage.check()


@pytest.mark.parametrize("state", ["frozen", "dead", "mute"])
async def test_an_index_that_is_no_use_delays_no_token(state: str) -> None:
    async with AsyncExitStack() as stack:
        if state == "frozen":
            address = await stack.enter_async_context(frozen_peer())
        elif state == "mute":
            mute = Index()
            mute.answers.clear()
            address = await stack.enter_async_context(serving(mute))
        else:
            address = "127.0.0.1:9"
        config = SchedulerConfig(port=0, http_port=0, kvstores=(address,))
        scheduler = await stack.enter_async_context(open_scheduler(config))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stage = Stage(scheduler, stack, tasks)
        _, client = await stage.pair(FakeWorkerSpec(num_blocks=17, step_time_s=0.001))
        handles = [client.add([i, i + 1, i + 2])[0] for i in range(1, 60)]
        for i, handle in enumerate(handles, start=1):
            await client.finished(handle)
            assert client.handles[handle].token_ids == expected_output([i, i + 1, i + 2], 4)
        stage.check()


async def test_publishing_returns_at_once_though_nobody_listens() -> None:
    publisher = KvPublisher(("127.0.0.1:9",), cluster_token=None)
    publisher.engine_up(CARD, published_keys=bytes)
    for number in range(200_000):
        publisher.publish(5, stored=[key(number)], removed=[])
    assert publisher.num_backlog_keys <= 65_536
