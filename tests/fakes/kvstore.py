"""A kvstore that answers over real gRPC and can be told to misbehave.

It notes everything that publishers say and answers from a script: at once, late, never, with a
refusal, or with a demand for a snapshot. It keeps no index; matches are what the test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from services.common.errors import SluicewayError
from services.common.pb import kvstore_pb2 as pb
from services.common.pb import kvstore_pb2_grpc as pb_grpc
from services.common.rpc import RpcServer

Context = grpc.aio.ServicerContext[object, object]


class FakeKvStore(pb_grpc.KvStoreServicer):
    """The servicer and its switches; each may be changed at any time.

    Attributes:
        address: "host:port" once it runs.
        delay_s: Every answer comes so much later, in seconds.
        refusal: Calls, and the next event of a stream, end with this error.
        snapshots_demanded: So many of the next plain events are answered NEED_SNAPSHOT.
        fenced_by: Events are answered FENCED by this engine; ``None`` = not.
        matches: engine_id → blocks, the answer to every match.
        scheduler_address: Of every engine in a match.
        degraded: What matches and lists say of the index.
        events: Everything that was published, in order.
        match_requests: Everything that was asked, in order.
        num_streams: Publishers' streams so far.
    """

    def __init__(self) -> None:
        self.address = ""
        self.delay_s = 0.0
        self.refusal: SluicewayError | None = None
        self.snapshots_demanded = 0
        self.fenced_by: int | None = None
        self.matches: dict[int, int] = {}
        self.scheduler_address = ""
        self.degraded = False
        self.events: list[pb.KvEvents] = []
        self.match_requests: list[pb.MatchRequest] = []
        self.num_streams = 0
        self._records: dict[int, pb.EngineRecord] = {}
        self._seqs: dict[int, int] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._news = asyncio.Condition()

    def freeze(self) -> None:
        """Answer nothing and read nothing until ``thaw``; connections stay open."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Go on where it was frozen."""
        self._thawed.set()

    async def wait_for_events(self, number: int) -> Sequence[pb.KvEvents]:
        """Everything published, once there are so many events."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.events) >= number)
        return self.events

    def keys_of(self, engine_id: int) -> set[bytes]:
        """What an engine holds if all that it said is taken in order (one tier, one group)."""
        held: set[bytes] = set()
        for event in self.events:
            if event.engine_id != engine_id:
                continue
            begins = event.HasField("snapshot") and event.snapshot.chunk == 0
            if event.cleared or begins or event.gone:
                held = set()
            held -= _split(event.removed)
            held |= _split(event.stored)
        return held

    async def Publish(
        self, request_iterator: AsyncIterator[pb.KvEvents], context: Context
    ) -> AsyncIterator[pb.KvAck]:
        self.num_streams += 1
        await self._misbehave()
        async for event in request_iterator:
            await self._misbehave()
            async with self._news:
                self.events.append(event)
                self._news.notify_all()
            yield self._answer(event)

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        await self._misbehave()
        self.match_requests.append(request)
        found = [
            pb.EngineMatch(
                engine_id=engine_id,
                num_blocks=[blocks],
                tier=[""],
                scheduler_address=self.scheduler_address,
            )
            for engine_id, blocks in self.matches.items()
        ]
        return pb.MatchReply(matches=found, degraded=self.degraded)

    async def Engines(self, request: pb.EnginesRequest, context: Context) -> pb.EnginesReply:
        await self._misbehave()
        entries = [pb.EngineEntry(record=record) for record in self._records.values()]
        return pb.EnginesReply(engines=entries, degraded=self.degraded)

    async def _misbehave(self) -> None:
        await self._thawed.wait()
        await asyncio.sleep(self.delay_s)
        if self.refusal is not None:
            raise self.refusal

    def _answer(self, event: pb.KvEvents) -> pb.KvAck:
        engine_id = event.engine_id
        if self.fenced_by is not None:
            status = pb.KV_ACK_STATUS_FENCED
            return pb.KvAck(engine_id=engine_id, status=status, seen_engine_id=self.fenced_by)
        if event.HasField("record"):
            self._records[engine_id] = event.record
        known = self._seqs.get(engine_id, 0)
        if event.HasField("snapshot"):
            seq = event.snapshot.base_seq if event.snapshot.last else known
        elif self.snapshots_demanded > 0:
            self.snapshots_demanded -= 1
            status = pb.KV_ACK_STATUS_NEED_SNAPSHOT
            return pb.KvAck(engine_id=engine_id, status=status, seq=known)
        else:
            seq = max(event.seq, known)
        self._seqs[engine_id] = seq
        return pb.KvAck(engine_id=engine_id, status=pb.KV_ACK_STATUS_OK, seq=seq)


@asynccontextmanager
async def running_kvstore(
    fake: FakeKvStore | None = None, *, port: int = 0, cluster_token: str | None = None
) -> AsyncIterator[FakeKvStore]:
    """Serve a fake for as long as the context lasts.

    Args:
        fake: What to serve; ``None`` = one that behaves.
        port: 0 = any free one; a fixed one lets a test bring it back at the same address.
        cluster_token: What calls must carry; ``None`` = nothing.
    """
    fake = fake or FakeKvStore()
    server = RpcServer(host="127.0.0.1", port=port, cluster_token=cluster_token)
    server.add(pb_grpc.add_KvStoreServicer_to_server, fake, "sluiceway.v1.KvStore")
    fake.address = await server.start()
    await server.set_ready(True)
    try:
        yield fake
    finally:
        await server.stop(grace_s=0)


def _split(packed: bytes) -> set[bytes]:
    return {packed[i : i + 16] for i in range(0, len(packed), 16)}
