"""Publishes which engine holds which KV blocks to one copy of the index, off the token path.

What engines call here returns at once and never waits for the network. An index that is away,
frozen or slow costs a bounded backlog and, once it is back, a snapshot (see ``kv_feed``); it never
delays a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import grpc

from services.common.errors import SluicewayError, Unavailable
from services.common.lifecycle import raise_if_cancelled
from services.common.pb import kvstore_pb2 as pb
from services.common.pb import kvstore_pb2_grpc as pb_grpc
from services.common.rpc import Endpoints, connect, translate
from services.common.telemetry import get_logger
from services.scheduler import metrics
from services.scheduler.convert import kv_change_to_message
from services.scheduler.kv_feed import EngineCard, KvFeed

ANSWER_TIMEOUT_S = 5.0
MAX_UNTOLD_ENDS = 64
NEWS_PERIOD_S = 0.1
"""Pause between rounds of messages: while many requests decode each step fills blocks, and who
looks for prefixes can do without the last of them for so long."""
_CHECK_PERIOD_S = 0.5
_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 5.0

log = get_logger(__name__)


class KvPublisher:
    """The feeds of all engines and the stream that carries them.

    ``engine_up``, ``publish`` and ``engine_down`` may be called whether or not an index can be
    reached; ``run`` does the sending.
    """

    def __init__(self, addresses: Sequence[str], *, cluster_token: str | None) -> None:
        """
        Args:
            addresses: Copies of the index; any one of them will do. Empty = nothing is published.
            cluster_token: See ``common/rpc.py``.
        """
        self._addresses = tuple(addresses)
        self._token = cluster_token
        self._feeds: dict[int, KvFeed] = {}
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()  # an engine has come or gone: that does not wait
        self._answered_at = 0.0

    @property
    def num_backlog_keys(self) -> int:
        """Changed keys that wait or are unacknowledged, over all engines; bounded per engine."""
        return sum(feed.num_backlog_keys for feed in self._feeds.values())

    def engine_up(self, card: EngineCard, *, published_keys: Callable[[], bytes]) -> None:
        """An engine is ready; it holds no blocks yet.

        Args:
            card: The engine.
            published_keys: All keys that its changes so far amount to, packed, for snapshots.
        """
        if self._addresses:
            self._feeds[card.engine_id] = KvFeed(card, published_keys=published_keys)
            self._tell_at_once()

    def engine_down(self, engine_id: int) -> None:
        """An engine has ended, whatever it held."""
        feed = self._feeds.get(engine_id)
        if feed is not None:
            feed.end()
            self._forget_oldest_ends()
            self._tell_at_once()

    def publish(
        self,
        engine_id: int,
        *,
        stored: Iterable[bytes],
        removed: Iterable[bytes],
        is_cleared: bool = False,
    ) -> None:
        """Blocks of an engine have changed: cleared first, then removed, then stored."""
        feed = self._feeds.get(engine_id)
        if feed is not None:
            feed.change(stored=stored, removed=removed, is_cleared=is_cleared)
            self._wake.set()

    def _tell_at_once(self) -> None:
        self._wake.set()
        self._hurry.set()

    def _forget_oldest_ends(self) -> None:
        """An index that stays away is not told of ends for ever: it forgets by leases as well."""
        ended = [engine_id for engine_id, feed in self._feeds.items() if feed.has_ended]
        for engine_id in ended[:-MAX_UNTOLD_ENDS]:
            del self._feeds[engine_id]

    async def run(self) -> None:
        """Keep a stream to one copy of the index, for ever; returns at once without addresses."""
        backoff_s = _FIRST_BACKOFF_S
        turn = 0
        while self._addresses:
            addresses = sorted(await Endpoints(self._addresses).resolve())
            began_at = time.monotonic()
            if addresses:
                await self._stream_to(addresses[turn % len(addresses)])
                turn += 1
            lived_s = time.monotonic() - began_at
            backoff_s = _FIRST_BACKOFF_S if lived_s > 10 else min(backoff_s * 2, _LAST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _stream_to(self, address: str) -> None:
        """One stream from its beginning to its failure."""
        channel = connect(address, cluster_token=self._token)
        try:
            call = pb_grpc.KvStoreStub(channel).Publish()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(call))
                await self._write(call)
        except* (SluicewayError, TimeoutError) as failures:
            metrics.KV_STREAM_UP.set(0)
            log.warning("kvstore_stream_ended", address=address, error=str(failures.exceptions[0]))
        finally:
            await channel.close()
        raise_if_cancelled()

    async def _read(self, call: PublishCall) -> None:
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                metrics.KV_STREAM_UP.set(1)
                self._answered_at = time.monotonic()
                self._on_answer(cast(pb.KvAck, answer))
        except grpc.aio.AioRpcError as error:
            raise translate(error) from None
        raise Unavailable("the kvstore ended the stream")

    async def _write(self, call: PublishCall) -> None:
        for feed in self._feeds.values():
            feed.reconnect()
        self._answered_at = time.monotonic()
        while True:
            self._wake.clear()
            self._hurry.clear()
            await self._write_news(call)
            await _until_set(self._hurry, timeout_s=NEWS_PERIOD_S)
            await _until_set(self._wake, timeout_s=_CHECK_PERIOD_S)
            self._check_answers()

    async def _write_news(self, call: PublishCall) -> None:
        for feed in list(self._feeds.values()):
            was_waiting = feed.has_unacked
            for change, introduces in feed.messages():
                message = kv_change_to_message(change, feed.card, introduces=introduces)
                await _write_one(call, message)
                metrics.KV_MESSAGES.inc()
            if feed.has_unacked and not was_waiting:
                self._answered_at = time.monotonic()
            if feed.is_over:
                self._feeds.pop(feed.card.engine_id, None)

    def _check_answers(self) -> None:
        metrics.KV_BACKLOG_KEYS.set(self.num_backlog_keys)
        is_waiting = any(feed.has_unacked and not feed.is_fenced for feed in self._feeds.values())
        if is_waiting and time.monotonic() - self._answered_at > ANSWER_TIMEOUT_S:
            raise Unavailable(f"the kvstore has not answered for {ANSWER_TIMEOUT_S:g} s")

    def _on_answer(self, answer: pb.KvAck) -> None:
        feed = self._feeds.get(answer.engine_id)
        if feed is None:
            return
        if answer.status == pb.KV_ACK_STATUS_OK:
            feed.acknowledge(answer.seq)
        elif answer.status == pb.KV_ACK_STATUS_NEED_SNAPSHOT:
            feed.need_snapshot(answer.seq)
            metrics.KV_SNAPSHOTS.inc()
        elif answer.status == pb.KV_ACK_STATUS_FENCED:
            log.warning(
                "engine_fenced", engine_id=answer.engine_id, seen_engine_id=answer.seen_engine_id
            )
            feed.fence()
        self._wake.set()


PublishCall = grpc.aio.StreamStreamCall[pb.KvEvents, pb.KvAck]


async def _until_set(event: asyncio.Event, *, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def _write_one(call: PublishCall, message: pb.KvEvents) -> None:
    """Write with a deadline: a frozen peer's full window must not hold the stream for ever."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await call.write(message)
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
    except asyncio.InvalidStateError:
        raise Unavailable("the stream to the kvstore has ended") from None
