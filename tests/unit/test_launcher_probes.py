"""What the launcher asks of its children, against real servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.common.rpc import RpcServer
from services.launcher.probes import GatewayState, Probes

TOKEN = "token"
GRACE_S = 60.0


async def start(port: int = 0) -> tuple[RpcServer, str]:
    server = RpcServer(host="127.0.0.1", port=port, cluster_token=TOKEN)
    return server, await server.start()


async def test_a_service_is_awaited_until_it_says_ready_and_may_then_stop_at_once() -> None:
    server, address = await start()
    async with Probes(cluster_token=TOKEN) as probes, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(probes.until_ready(address))
        await server.set_ready(False)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await server.set_ready(True)
        async with asyncio.timeout(30):
            await waiting
        began = time.monotonic()
        await server.stop(grace_s=GRACE_S)
        # No watch was left open, for which a server that stops would wait.
        assert time.monotonic() - began < GRACE_S / 2


async def test_a_service_that_goes_away_and_comes_back_is_asked_again() -> None:
    server, address = await start()
    await server.set_ready(False)
    async with Probes(cluster_token=TOKEN) as probes, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(probes.until_ready(address))
        await asyncio.sleep(0.2)
        await server.stop(grace_s=0)
        server, _ = await start(int(address.rpartition(":")[2]))
        await server.set_ready(True)
        async with asyncio.timeout(30):
            await waiting
    await server.stop(grace_s=0)


async def test_who_does_not_answer_has_no_state() -> None:
    async with Probes(cluster_token=TOKEN) as probes:
        assert await probes.worker_state("127.0.0.1:9") is None
        assert await probes.traffic("127.0.0.1:9") is None
        state = await probes.gateway_state("http://127.0.0.1:9")
        assert state == GatewayState(False, "no answer (ConnectError)")


class _Gateway(BaseHTTPRequestHandler):
    status = 503
    body = b'{"error": {"message": "no worker is attached"}}'

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def gateway_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_gateway_that_is_not_ready_says_why(gateway_url: str) -> None:
    async with Probes(cluster_token=TOKEN) as probes:
        state = await probes.gateway_state(gateway_url)
    assert state == GatewayState(False, "no worker is attached")
