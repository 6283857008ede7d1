"""/health, /live, /version, /v1/models, and what happens when tokenizers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services import __version__
from services.common.errors import Unavailable, WorkerLost
from services.common.pb import common_pb2 as pb
from services.common.pb import tokenizer_pb2
from tests.fakes.tokenizer import MAX_MODEL_LEN, MODEL, FakeTokenizer, Script, ready_info
from tests.unit.gateway.http.conftest import Front, gateway

WITHIN_S = 600
LOST_WITHIN_S = 1.0


def loading_info() -> tokenizer_pb2.ServiceInfo:
    """A tokenizer whose only worker loads its weights."""
    loading = pb.Loading(phase="load weights", fraction=0.43)
    engine = pb.EngineState(
        engine_id=7, worker_id="worker-a", phase=pb.ENGINE_PHASE_LOADING, loading=loading
    )
    return tokenizer_pb2.ServiceInfo(
        model=MODEL, engines=[engine], not_ready_reason="no engine is ready"
    )


async def until_percent(front: Front) -> dict[str, Any]:
    """What /health says once it knows how far the worker is."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            body: dict[str, Any] = (await front.http.get("/health")).json()
            if body["percent"] is not None:
                return body
            await asyncio.sleep(0.01)


async def test_health_is_ok_once_a_request_would_succeed(front: Front) -> None:
    response = await front.http.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok"}


async def test_while_loading_health_is_503_with_phase_and_percent() -> None:
    async with FakeTokenizer().serving() as tokenizer:
        await tokenizer.set_info(loading_info())
        async with gateway(tokenizer, wait=False) as front:
            body = await until_percent(front)
            assert (body["phase"], body["percent"]) == ("load weights", 43)
            assert body["error"]["code"] == "unavailable"
            response = await front.chat()
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            await tokenizer.set_info(ready_info())
            await front.until_health(200)
            assert (await front.chat()).status_code == 200


async def test_ping_says_what_health_says() -> None:
    async with FakeTokenizer().serving() as tokenizer:
        await tokenizer.set_info(loading_info())
        async with gateway(tokenizer, wait=False) as front:
            assert (await front.http.get("/ping")).status_code == 503
            await tokenizer.set_info(ready_info())
            await front.until_health(200)
            assert (await front.http.get("/ping")).json() == {"status": "ok"}


async def test_load_counts_the_requests_inside(front: Front) -> None:
    gate = asyncio.Event()
    front.tokenizer.script = Script(gate=gate)
    async with asyncio.TaskGroup() as group:
        group.create_task(front.chat())
        await front.tokenizer.wait_for_requests(1)
        assert (await front.http.get("/load")).json() == {"server_load": 1}
        gate.set()
    assert (await front.http.get("/load")).json() == {"server_load": 0}


async def test_the_prefix_caches_can_be_reset_and_busy_engines_are_told(front: Front) -> None:
    reset = (await front.http.post("/reset_prefix_cache")).json()
    assert reset == {"engines_reset": 2, "engines_busy": 0}
    gate = asyncio.Event()
    front.tokenizer.script = Script(gate=gate)
    async with asyncio.TaskGroup() as group:
        group.create_task(front.chat())
        await front.tokenizer.wait_for_requests(1)
        reset = (await front.http.post("/reset_prefix_cache")).json()
        gate.set()
    assert reset == {"engines_reset": 1, "engines_busy": 1}
    await front.tokenizer.set_info(tokenizer_pb2.ServiceInfo(model=MODEL))
    await front.until_health(503)
    assert (await front.http.post("/reset_prefix_cache")).status_code == 503


async def test_live_and_version_answer_without_any_tokenizer() -> None:
    async with FakeTokenizer().serving() as tokenizer:
        await tokenizer.die()
        async with gateway(tokenizer, wait=False) as front:
            assert (await front.http.get("/live")).json() == {"status": "alive"}
            assert (await front.http.get("/version")).json() == {"version": __version__}
            assert (await front.http.get("/health")).status_code == 503
            assert (await front.http.get("/v1/models")).json()["data"] == []
            assert (await front.chat()).status_code == 503


async def test_a_lost_engine_makes_health_503_within_a_second(front: Front) -> None:
    not_ready = tokenizer_pb2.ServiceInfo(model=MODEL, not_ready_reason="no engine")
    await front.tokenizer.set_info(not_ready)
    assert await front.until_health(503) < LOST_WITHIN_S
    assert "no engine" in (await front.http.get("/health")).json()["error"]["message"]


async def test_a_dead_tokenizer_makes_health_503_within_a_second_and_may_come_back() -> None:
    tokenizer = FakeTokenizer()
    async with tokenizer.serving():
        port = int(tokenizer.address.rpartition(":")[2])
        async with gateway(tokenizer) as front:
            await tokenizer.die()
            assert await front.until_health(503) < LOST_WITHIN_S
            async with FakeTokenizer().serving(port=port):
                await front.until_health(200)
                assert (await front.chat()).status_code == 200


async def test_models_lists_the_served_name_with_its_context(front: Front) -> None:
    listed = (await front.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == MODEL
    assert model["object"] == "model"
    assert isinstance(model["created"], int)
    assert model["owned_by"] == "sluiceway"
    assert model["max_model_len"] == MAX_MODEL_LEN
    assert (await front.http.get(f"/v1/models/{MODEL}")).json() == model
    missing = await front.http.get("/v1/models/nope")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@asynccontextmanager
async def two_tokenizers() -> AsyncIterator[tuple[Front, FakeTokenizer, FakeTokenizer]]:
    """A gateway that has heard of both."""
    async with (
        FakeTokenizer().serving() as one,
        FakeTokenizer().serving() as two,
        gateway(one, two) as front,
    ):
        async with asyncio.timeout(WITHIN_S):
            while not (one.requests and two.requests):
                await front.chat()
        one.requests.clear()
        two.requests.clear()
        yield front, one, two


async def test_requests_go_round_robin_over_the_tokenizers() -> None:
    async with two_tokenizers() as (front, one, two):
        for _ in range(6):
            await front.chat()
        assert len(one.requests) == len(two.requests) == 3


async def test_a_request_that_one_copy_cannot_take_goes_to_another_with_the_next_attempt() -> None:
    async with two_tokenizers() as (front, bad, good):
        for error in (Unavailable("draining"), WorkerLost("died")):
            bad.script = Script(refusal=error)
            for _ in range(4):
                assert (await front.chat()).status_code == 200
        assert len(good.requests) == 8
        moved = {request.key.request_id: request.key.attempt for request in good.requests}
        tried = {request.key.request_id for request in bad.requests}
        assert tried
        assert all(moved[request_id] == 1 for request_id in tried)


async def test_after_the_first_delta_a_request_is_not_sent_again() -> None:
    async with two_tokenizers() as (front, one, two):
        for tokenizer in (one, two):
            tokenizer.script = Script(breaks_after=1, break_error=WorkerLost("died"))
        assert (await front.chat()).status_code == 502
        assert len(one.requests) + len(two.requests) == 1
