"""Asks the KV index who holds the beginning of a prompt. Advice: no answer is no harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import grpc

from services.common.pb import kvstore_pb2, kvstore_pb2_grpc
from services.common.rpc import Endpoints, connect
from services.tokenizer import metrics

MATCH_BUDGET_S = 0.020


class KvStoreClient:
    """Connections to every copy of the index, asked in turn.

    Attributes:
        is_degraded: Whether the last answer was made from old knowledge.
    """

    def __init__(self, addresses: Sequence[str], *, cluster_token: str | None) -> None:
        """
        Args:
            addresses: "host:port" or "dns:///name:port" each; none = never asked.
            cluster_token: What the index wants to see; ``None`` = nothing.
        """
        self.is_degraded = False
        self._endpoints = Endpoints(addresses)
        self._cluster_token = cluster_token
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turn = count()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the connections for as long as the context lasts."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._follow_addresses())
            try:
                yield
            finally:
                watch.cancel()

    async def match(self, keys: Sequence[bytes], *, model: str, text_fp: str) -> dict[int, int]:
        """How much of a prompt each engine holds.

        Args:
            keys: Block keys of the prompt, in order.
            model: Served name.
            text_fp: Fingerprint that the engines must have.

        Returns:
            engine_id → contiguous blocks from the first; empty if there was no answer in time.
        """
        if not self._channels:
            return {}
        request = kvstore_pb2.MatchRequest(keys=b"".join(keys), model=model, text_fp=text_fp)
        try:
            reply = await self._next_stub().Match(request, timeout=MATCH_BUDGET_S)
        except grpc.aio.AioRpcError as error:
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            metrics.MATCHES.labels("late" if is_late else "failed").inc()
            return {}
        metrics.MATCHES.labels("answered").inc()
        self.is_degraded = reply.degraded
        return {match.engine_id: max(match.num_blocks, default=0) for match in reply.matches}

    def _next_stub(self) -> kvstore_pb2_grpc.KvStoreAsyncStub:
        addresses = sorted(self._channels)
        return kvstore_pb2_grpc.KvStoreStub(
            self._channels[addresses[next(self._turn) % len(addresses)]]
        )

    async def _follow_addresses(self) -> None:
        try:
            async for addresses in self._endpoints.watch():
                for address in self._channels.keys() - addresses:
                    await self._channels.pop(address).close()
                for address in addresses - self._channels.keys():
                    self._channels[address] = connect(address, cluster_token=self._cluster_token)
        finally:
            for channel in self._channels.values():
                await channel.close()
