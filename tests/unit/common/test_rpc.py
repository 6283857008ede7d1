"""Servers and channels: token, errors, health, reflection, addresses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    SluicewayError,
    Unavailable,
)
from services.common.pb import tokenizer_pb2, tokenizer_pb2_grpc
from services.common.rpc import Endpoints, RpcServer, connect, translate
from services.common.telemetry import bind_request, bound_field


class Failing(tokenizer_pb2_grpc.TokenizerServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Tokenize(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield tokenizer_pb2.TextDelta(has_prompt=True)
        raise self.error


@asynccontextmanager
async def serving(
    what: Exception | tokenizer_pb2_grpc.TokenizerServicer, *, token: str | None = None
) -> AsyncIterator[tuple[RpcServer, str]]:
    server = RpcServer(host="127.0.0.1", port=0, cluster_token=token)
    servicer = Failing(what) if isinstance(what, Exception) else what
    server.add(
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server, servicer, "sluiceway.v1.Tokenizer"
    )
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.stop(grace_s=0)


@asynccontextmanager
async def stub(address: str, *, token: str | None = None) -> AsyncIterator[Any]:
    channel = connect(address, cluster_token=token)
    try:
        yield tokenizer_pb2_grpc.TokenizerStub(channel)
    finally:
        await channel.close()


async def failure_of(address: str, *, token: str | None = None) -> SluicewayError:
    async with stub(address, token=token) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.Tokenize(tokenizer_pb2.TokenizeRequest(), timeout=30)
    return translate(caught.value)


async def test_an_error_arrives_as_the_class_that_was_raised() -> None:
    sent = Overloaded("full", param="n", retry_after_s=1.5)
    async with serving(sent) as (_, address):
        got = await failure_of(address)
    assert type(got) is Overloaded
    assert (got.message, got.param, got.retry_after_s) == ("full", "n", 1.5)


async def test_an_error_in_a_stream_arrives_after_what_was_sent() -> None:
    async with serving(InvalidRequest("bad", param="top_p")) as (_, address):
        async with stub(address) as client:
            call = client.Generate(tokenizer_pb2.GenerateRequest(), timeout=30)
            first = await call.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
    assert first.has_prompt
    assert translate(caught.value).param == "top_p"


async def test_a_new_channel_is_not_refused_for_what_an_older_one_to_that_address_met() -> None:
    server = RpcServer(host="127.0.0.1", port=0, cluster_token=None)
    address = await server.start()
    await server.stop(grace_s=0)
    async with stub(address) as older:
        for _ in range(8):  # each failure makes it wait longer before it connects again
            with pytest.raises(grpc.aio.AioRpcError):
                await older.Tokenize(
                    tokenizer_pb2.TokenizeRequest(), timeout=30, wait_for_ready=False
                )
            await asyncio.sleep(0.3)
        again = RpcServer(host="127.0.0.1", port=int(address.split(":")[1]), cluster_token=None)
        again.add(
            tokenizer_pb2_grpc.add_TokenizerServicer_to_server,
            Failing(InvalidRequest("served", param="n")),
            "sluiceway.v1.Tokenizer",
        )
        await again.start()
        try:
            assert (await failure_of(address)).message == "served"
        finally:
            await again.stop(grace_s=0)


class Hanging(tokenizer_pb2_grpc.TokenizerServicer):
    """Answers nothing, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Tokenize(self, request: Any, context: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def test_a_call_beyond_its_deadline_is_named_so_and_ends_on_both_sides() -> None:
    servicer = Hanging()
    async with serving(servicer) as (_, address), stub(address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.Tokenize(tokenizer_pb2.TokenizeRequest(), timeout=0.2)
        async with asyncio.timeout(30):
            await servicer.cancelled.wait()
    assert type(translate(caught.value)) is DeadlineExceeded


async def test_a_peer_that_cannot_be_reached_is_unavailable() -> None:
    async with serving(InvalidRequest("x")) as (_, address):
        pass
    async with stub(address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.Tokenize(tokenizer_pb2.TokenizeRequest(), timeout=30)
    assert type(translate(caught.value)) is Unavailable


async def test_an_unexpected_exception_becomes_an_internal_error_with_a_debug_id() -> None:
    async with serving(ZeroDivisionError("secret detail")) as (_, address):
        got = await failure_of(address)
    assert got.http_status == 500
    assert "debug id" in got.message
    assert "secret" not in got.message


@pytest.mark.parametrize("given", [None, "wrong"])
async def test_a_call_without_the_cluster_token_is_refused(given: str | None) -> None:
    async with serving(InvalidRequest("reached"), token="right") as (_, address):
        assert (await failure_of(address, token=given)).http_status == 401
        assert (await failure_of(address, token="right")).message == "reached"


class Logging(tokenizer_pb2_grpc.TokenizerServicer):
    """Answers with the request id that its log lines would carry."""

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return tokenizer_pb2.DetokenizeReply(text=bound_field("request_id") or "")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(2):
            text = bound_field("request_id") or ""
            yield tokenizer_pb2.TextDelta(choices=[tokenizer_pb2.ChoiceDelta(text=text)])


async def test_the_request_id_of_the_caller_is_on_the_log_lines_of_the_callee() -> None:
    async with serving(Logging()) as (_, address), stub(address) as client:
        with bind_request(request_id="r-1"):
            reply = await client.Detokenize(tokenizer_pb2.DetokenizeRequest(), timeout=30)
            call = client.Generate(tokenizer_pb2.GenerateRequest(), timeout=30)
        deltas = [delta.choices[0].text async for delta in call]
        other = await client.Detokenize(tokenizer_pb2.DetokenizeRequest(), timeout=30)
    assert reply.text == "r-1"
    assert deltas == ["r-1", "r-1"]
    assert other.text == ""


async def test_health_needs_no_token_and_follows_what_is_set() -> None:
    async with serving(InvalidRequest("x"), token="t") as (server, address):
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def ask(name: str) -> int:
                reply = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
                return int(reply.status)

            serving_status = health_pb2.HealthCheckResponse.SERVING
            assert await ask("") == serving_status
            await server.set_ready(True)
            assert await ask("ready") == serving_status
            await server.set_ready(False)
            assert await ask("ready") != serving_status


async def test_reflection_names_the_service() -> None:
    async with serving(InvalidRequest("x")) as (_, address):
        async with grpc.aio.insecure_channel(address) as channel:
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            async for reply in reflect.ServerReflectionInfo(iter([request]), timeout=30):
                names = {service.name for service in reply.list_services_response.service}
                break
    assert {"sluiceway.v1.Tokenizer", "grpc.health.v1.Health"} <= names


def test_listening_beyond_loopback_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="cluster token"):
        RpcServer(host="0.0.0.0", port=0, cluster_token=None)


async def test_a_taken_port_is_named() -> None:
    async with serving(InvalidRequest("x")) as (_, address):
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=str(port)):
            await RpcServer(host="127.0.0.1", port=port, cluster_token=None).start()


async def test_a_name_is_resolved_to_every_address_and_plain_ones_are_kept() -> None:
    endpoints = Endpoints(["dns:///localhost:5", "10.0.0.1:6"])
    found = await endpoints.resolve()
    assert "10.0.0.1:6" in found
    assert "127.0.0.1:5" in found


async def test_a_name_that_does_not_exist_is_no_address() -> None:
    assert await Endpoints(["dns:///no-such-host.invalid:5"]).resolve() == frozenset()
