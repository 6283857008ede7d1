"""Asks the children how they are: gRPC health, the worker's loading, the gateway's /health."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.pb import (
    common_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.common.rpc import READY, connect

_CALL_TIMEOUT_S = 2.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker says of itself.

    Attributes:
        phase: What it does before it is ready ("weights"); "" = nothing to say.
        fraction: 0..1 of the phase.
        done_bytes: Bytes of the phase so far; 0 where it has none.
        total_bytes: Bytes of the phase in all.
        kv_tokens: Capacity of its KV cache in tokens; 0 = not known yet.
        max_model_len: Longest context in tokens; 0 = not known yet.
        device: "cpu", "cuda:0"; "" = not known yet.
        dtype: Of the weights; "" = not known yet.
    """

    phase: str = ""
    fraction: float = 0.0
    done_bytes: int = 0
    total_bytes: int = 0
    kv_tokens: int = 0
    max_model_len: int = 0
    device: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a scheduler does, summed over its engines.

    Attributes:
        requests: That it holds.
        running: Choices that are in the steps.
        waiting: Choices that wait for a place.
        prompt_tokens: Computed or found in the cache so far.
        generated_tokens: So far.
        cache_queries: Prompt tokens looked up in the prefix cache so far.
        cache_hits: Of these, those found.
        blocks_used: KV blocks that requests hold.
        blocks_total: KV blocks that there are.
    """

    requests: int = 0
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    blocks_used: int = 0
    blocks_total: int = 0


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What the gateway's /health says."""

    is_ready: bool
    reason: str


class Probes:
    """Questions to the children; every answer is a fact or "no answer". Use as ``async with``."""

    def __init__(self, *, cluster_token: str) -> None:
        """
        Args:
            cluster_token: What the children want to see.
        """
        self._token = cluster_token
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._http = httpx.AsyncClient(timeout=_CALL_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()
        for channel in self._channels.values():
            await channel.close()

    async def until_ready(self, address: str) -> None:
        """Return once the gRPC service there says that a request would succeed.

        A service that goes away and comes back is simply asked again.
        """
        while not await self._watch_ready(address):  # noqa: ASYNC110 - paces the calls that fail
            await asyncio.sleep(_POLL_S)

    async def _watch_ready(self, address: str) -> bool:
        # The published types of the stub do not know Watch.
        stub: Any = health_pb2_grpc.HealthStub(self._channel(address))
        call = stub.Watch(health_pb2.HealthCheckRequest(service=READY), wait_for_ready=True)
        try:
            async for reply in call:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return True
        except grpc.aio.AioRpcError:
            return False
        finally:
            call.cancel()  # one that is only forgotten stays open: a server that stops waits for it
        return False

    async def worker_state(self, address: str) -> WorkerState | None:
        """How far a worker is; ``None`` = it does not answer."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(address))
        try:
            reply = await stub.Info(worker_pb2.WorkerInfoRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        return _worker_state(reply.state)

    async def traffic(self, address: str) -> Traffic | None:
        """What a scheduler does; ``None`` = it does not answer."""
        stub = scheduler_pb2_grpc.SchedulerStub(self._channel(address))
        try:
            reply = await stub.Stats(scheduler_pb2.StatsRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        return _traffic(reply)

    async def gateway_state(self, url: str) -> GatewayState:
        """Whether the gateway would serve a request, and if not, why."""
        try:
            reply = await self._http.get(f"{url}/health")
        except httpx.HTTPError as error:
            return GatewayState(False, f"no answer ({type(error).__name__})")
        return GatewayState(reply.status_code == httpx.codes.OK, _reason(reply.text))

    async def until_gateway_ready(self, url: str) -> None:
        """Return once /health is 200."""
        while not (await self.gateway_state(url)).is_ready:  # noqa: ASYNC110 - HTTP only answers
            await asyncio.sleep(_POLL_S)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = connect(address, cluster_token=self._token)
        return self._channels[address]


def _worker_state(state: common_pb2.EngineState) -> WorkerState:
    info, loading = state.info, state.loading
    block_size = info.kv_groups[0].block_size if info.kv_groups else 0
    return WorkerState(
        phase=loading.phase,
        fraction=loading.fraction,
        done_bytes=loading.done_bytes,
        total_bytes=loading.total_bytes,
        kv_tokens=info.num_blocks * block_size,
        max_model_len=info.max_model_len,
        device=info.device,
        dtype=info.dtype,
    )


def _traffic(reply: scheduler_pb2.StatsReply) -> Traffic:
    loads = [engine.load for engine in reply.engines]
    return Traffic(
        requests=reply.num_requests,
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        prompt_tokens=sum(load.prompt_tokens for load in loads),
        generated_tokens=sum(load.generated_tokens for load in loads),
        cache_queries=sum(load.prefix_queries for load in loads),
        cache_hits=sum(load.prefix_hits for load in loads),
        blocks_used=sum(load.kv_blocks_used for load in loads),
        blocks_total=sum(load.kv_blocks_total for load in loads),
    )


def _reason(body: str) -> str:
    """The message of OpenAI's error envelope, or whatever else the body says."""
    try:
        found = json.loads(body)
    except json.JSONDecodeError:
        return body[:200]
    error = found.get("error") if isinstance(found, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else ""
