"""The KvStore service of the wire, over any backend."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from itertools import count

from grpc.aio import ServicerContext

from services.common.errors import InvalidRequest
from services.common.pb import kvstore_pb2 as pb
from services.common.pb import kvstore_pb2_grpc as pb_grpc
from services.kvstore import metrics
from services.kvstore.backend import IndexBackend
from services.kvstore.bell import Bell
from services.kvstore.convert import (
    ack_to_message,
    entry_to_message,
    events_from_message,
    match_to_message,
    record_from_message,
)
from services.kvstore.events import EngineRecord

Context = ServicerContext[object, object]


class KvStoreServicer(pb_grpc.KvStoreServicer):
    """Answers publishers and those who ask.

    Nothing here waits but ``Publish`` for the backend; a match is a bounded piece of work.
    """

    def __init__(self, backend: IndexBackend, changes: Bell) -> None:
        """
        Args:
            backend: Where the index lives.
            changes: Rings when the list of engines has changed.
        """
        self._backend = backend
        self._changes = changes
        self._streams = count()

    async def Publish(
        self, request_iterator: AsyncIterator[pb.KvEvents], context: Context
    ) -> AsyncIterator[pb.KvAck]:
        """Take the events of a publisher's engines; one answer each, in order.

        Raises:
            InvalidRequest: A malformed event, or an engine that this stream has not introduced.
        """
        stream = next(self._streams)
        records: dict[int, EngineRecord] = {}
        metrics.STREAMS.inc()
        try:
            async for message in request_iterator:
                yield await self._publish(message, records=records, stream=stream)
        finally:
            metrics.STREAMS.dec()
            self._backend.end_stream(stream)

    async def _publish(
        self, message: pb.KvEvents, *, records: dict[int, EngineRecord], stream: int
    ) -> pb.KvAck:
        if message.HasField("record"):
            records[message.engine_id] = record_from_message(message.record)
        record = records.get(message.engine_id)
        if record is None:
            raise InvalidRequest(
                f"engine {message.engine_id} was not introduced: the first event of an engine on a "
                "stream needs its record",
                param="record",
            )
        events = events_from_message(message)
        ack = await self._backend.publish(events, record=record, stream=stream)
        metrics.EVENTS.labels(ack.status.value).inc()
        if events.is_gone:
            del records[events.engine_id]
        return ack_to_message(ack)

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        """How much of a chain of keys each engine holds.

        Raises:
            InvalidRequest: The packed keys have a wrong length.
        """
        began_at = time.perf_counter()
        matches = self._backend.index.match(
            request.keys,
            max_blocks=request.max_blocks,
            model=request.model,
            text_fp=request.text_fp,
        )
        metrics.MATCHES.labels("yes" if matches else "no").inc()
        metrics.MATCH_SECONDS.observe(time.perf_counter() - began_at)
        return pb.MatchReply(
            matches=map(match_to_message, matches), degraded=self._backend.is_degraded
        )

    async def Engines(self, request: pb.EnginesRequest, context: Context) -> pb.EnginesReply:
        """The engines that are known, of one model or of all."""
        return self._list(request)

    async def Watch(
        self, request: pb.EnginesRequest, context: Context
    ) -> AsyncIterator[pb.EnginesReply]:
        """The list of engines at once and then whenever it, or ``degraded``, has changed."""
        while True:
            change = self._changes.next_ring()
            yield self._list(request)
            await change.wait()

    def _list(self, request: pb.EnginesRequest) -> pb.EnginesReply:
        entries = self._backend.index.engines(model=request.model)
        return pb.EnginesReply(
            engines=map(entry_to_message, entries), degraded=self._backend.is_degraded
        )
