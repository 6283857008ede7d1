"""A real gateway in front of a fake tokenizer, over real HTTP and gRPC on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest

from services.gateway.config import GatewayConfig
from services.gateway.server import GatewayServer
from tests.fakes.tokenizer import MODEL, FakeTokenizer

READY_WITHIN_S = 600
POLL_S = 0.05


@dataclass
class Front:
    """What a test talks to."""

    url: str
    http: httpx.AsyncClient
    tokenizer: FakeTokenizer
    server: GatewayServer

    async def chat(self, **fields: Any) -> httpx.Response:
        """POST a chat."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "one two three", **fields: Any) -> httpx.Response:
        """POST a completion."""
        body = {"model": MODEL, "prompt": prompt} | fields
        return await self.http.post("/v1/completions", json=body)

    async def respond(self, given: Any = "Hi", **fields: Any) -> httpx.Response:
        """POST a request for a response."""
        return await self.http.post("/v1/responses", json={"model": MODEL, "input": given} | fields)

    async def until_health(self, status: int) -> float:
        """Seconds until /health has this status; HTTP has no way to be told."""
        start = time.monotonic()
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                if (await self.http.get("/health")).status_code == status:
                    return time.monotonic() - start
                await asyncio.sleep(POLL_S)


def events(response: httpx.Response) -> list[Any]:
    """The data of each event of a streamed reply; "[DONE]" as it stands."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        assert block.startswith("data: ") and "\n" not in block, block
    found = [block.removeprefix("data: ") for block in blocks]
    return [data if data == "[DONE]" else orjson.loads(data) for data in found]


@asynccontextmanager
async def gateway(
    *tokenizers: FakeTokenizer,
    wait: bool = True,
    headers: dict[str, str] | None = None,
    **config: Any,
) -> AsyncIterator[Front]:
    """A gateway in front of tokenizers that serve already."""
    addresses = tuple(tokenizer.address for tokenizer in tokenizers)
    settings = GatewayConfig(port=0, tokenizers=addresses, drain_timeout_s=5, **config)
    async with asyncio.TaskGroup() as group:
        server = GatewayServer(settings)
        address = await server.start(group)
        url = f"http://{address}"
        async with httpx.AsyncClient(
            base_url=url, timeout=30, trust_env=False, headers=headers
        ) as http:
            front = Front(url, http, tokenizers[0], server)
            try:
                if wait:
                    await front.until_health(200)
                yield front
            finally:
                await http.aclose()
                await server.stop()


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """A gateway with defaults and one fake tokenizer."""
    async with FakeTokenizer().serving() as tokenizer, gateway(tokenizer) as found:
        yield found
