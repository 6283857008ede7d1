"""The service as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.pb import kvstore_pb2 as pb
from services.common.pb import kvstore_pb2_grpc as pb_grpc
from services.common.rpc import READY, connect

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "services.kvstore"]


@dataclass
class Started:
    """A running process and what it said when it listened."""

    process: subprocess.Popen[str]
    address: str
    http_port: int


@pytest.fixture
def started() -> Iterator[Started]:
    flags = ["--port", "0", "--http-port", "0", "--log-format", "json", "--cluster-token", "secret"]
    with subprocess.Popen(
        [*COMMAND, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert said["event"] == "listening"
            yield Started(process, said["address"], said["http_port"])
        finally:
            process.kill()


async def test_it_serves_matches_and_is_ready(started: Started) -> None:
    channel = connect(started.address, cluster_token="secret")
    try:
        reply = await pb_grpc.KvStoreStub(channel).Match(pb.MatchRequest(keys=b"k" * 16))
        assert reply == pb.MatchReply()
        health = health_pb2_grpc.HealthStub(channel)
        state = await health.Check(health_pb2.HealthCheckRequest(service=READY))
        assert state.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await channel.close()


async def test_a_wrong_cluster_token_is_refused(started: Started) -> None:
    channel = connect(started.address, cluster_token="other")
    try:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await pb_grpc.KvStoreStub(channel).Engines(pb.EnginesRequest())
    finally:
        await channel.close()
    assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_it_shows_metrics_and_ends_cleanly_when_asked(started: Started) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{started.http_port}/metrics") as page:
        assert b"sluiceway_kvstore_engines 0.0" in page.read()
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait() == 0


def test_an_index_url_that_nobody_serves_is_a_config_error() -> None:
    finished = subprocess.run(
        [*COMMAND, "--kv-index-url", "ftp://x"], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.returncode == 2
    assert "'ftp://x' must begin with memory://, redis:// or valkey://" in finished.stdout
