"""At the door: API keys, CORS, the in-flight limit, request ids, drain."""

from __future__ import annotations

import asyncio
import hashlib

import httpx
import pytest

from services.common.errors import ConfigError
from services.gateway.auth import ApiKeys
from services.gateway.fleet import Fleet
from tests.fakes.tokenizer import MODEL, FakeTokenizer, Script
from tests.unit.gateway.http.conftest import Front, gateway

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
KEY = "sk-one"
HASHED = "sha256:" + hashlib.sha256(b"sk-two").hexdigest()


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["Bearer"],
        ["Basic x"],
        [KEY],
        [f"Bearer {KEY}x"],
        [f"Bearer {KEY[:-1]}"],
        [f"Bearer  {KEY}"],
        [f"Bearer {KEY}", "Bearer wrong"],
        ["Bearer wrong", f"Bearer {KEY}"],
        ["Bearer é"],
    ],
)
async def test_anything_but_the_exact_key_is_a_401(given: list[str]) -> None:
    async with FakeTokenizer().serving() as tokenizer, gateway(tokenizer, api_key=(KEY,)) as front:
        headers = [("authorization", value.encode("latin-1")) for value in given]
        response = await front.http.post(CHAT, json=BODY, headers=headers)  # type: ignore[arg-type]
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert tokenizer.requests == []


async def test_the_key_opens_with_any_spelling_of_the_scheme_and_may_be_kept_as_a_hash() -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, api_key=(KEY, HASHED)) as front,
    ):
        for value in (f"Bearer {KEY}", f"bearer {KEY}", "BEARER sk-two"):
            response = await front.http.post(CHAT, json=BODY, headers={"authorization": value})
            assert response.status_code == 200
        first, again, other = tokenizer.requests
        assert first.tenant == again.tenant != other.tenant
        assert first.cache_namespace == again.cache_namespace != other.cache_namespace
        assert KEY not in first.tenant


async def test_only_operation_routes_are_open_without_a_key() -> None:
    async with FakeTokenizer().serving() as tokenizer, gateway(tokenizer, api_key=(KEY,)) as front:
        for path in ("/health", "/live", "/metrics", "/version"):
            assert (await front.http.get(path)).status_code == 200, path
        for path in ("/v1/models", "/docs", "/openapi.json", "/no-such-route", "/health/"):
            assert (await front.http.get(path)).status_code == 401, path


def test_an_empty_key_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="empty"):
        ApiKeys(["a", ""])


def test_a_hash_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal"):
        ApiKeys(["sha256:abc"])


async def test_cors_is_off_unless_configured(front: Front) -> None:
    headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
    response = await front.http.options(CHAT, headers=headers)
    assert response.status_code == 405
    response = await front.http.post(CHAT, json=BODY, headers={"origin": "http://a.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_a_preflight_needs_no_key_but_the_request_does() -> None:
    origin = "http://a.example"
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, api_key=(KEY,), allowed_origins=(origin,)) as front,
    ):
        preflight = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        response = await front.http.options(CHAT, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert "POST" in response.headers["access-control-allow-methods"]
        response = await front.http.post(CHAT, json=BODY, headers={"origin": origin})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    ("origin", "method"), [("http://evil.example", "POST"), ("http://a.example", "BREW")]
)
async def test_a_preflight_that_is_refused_is_a_400_in_the_envelope(
    origin: str, method: str
) -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, allowed_origins=("http://a.example",)) as front,
    ):
        preflight = {"origin": origin, "access-control-request-method": method}
        response = await front.http.options(CHAT, headers=preflight)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.headers.get("access-control-allow-origin") != "http://evil.example"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
async def test_a_browser_may_read_the_answer_to_a_bug(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("a secret")

    origin = "http://a.example"
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, allowed_origins=(origin,)) as front,
    ):
        monkeypatch.setattr(Fleet, "models", broken)
        monkeypatch.setattr(Fleet, "resolve_model", broken)
        method = "GET" if path == "/v1/models" else "POST"
        body = None if method == "GET" else BODY
        headers = {"origin": origin}
        response = await front.http.request(method, path, json=body, headers=headers)
        assert response.status_code == 500
        assert response.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in response.headers["access-control-expose-headers"]


async def test_beyond_the_in_flight_limit_requests_are_429_with_retry_after() -> None:
    gate = asyncio.Event()
    async with (
        FakeTokenizer(Script(gate=gate)).serving() as tokenizer,
        gateway(tokenizer, max_in_flight=2) as front,
    ):
        async with asyncio.TaskGroup() as group:
            inside = [group.create_task(front.chat()) for _ in range(2)]
            await tokenizer.wait_for_requests(2)
            refused = await front.chat()
            gate.set()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        assert [task.result().status_code for task in inside] == [200, 200]
        assert (await front.chat()).status_code == 200


async def test_a_key_beyond_its_own_limit_is_429_while_others_are_served() -> None:
    gate = asyncio.Event()
    async with (
        FakeTokenizer(Script(gate=gate)).serving() as tokenizer,
        gateway(tokenizer, api_key=(KEY, HASHED), max_in_flight_per_key=1) as front,
    ):
        mine = {"authorization": f"Bearer {KEY}"}
        other = {"authorization": "Bearer sk-two"}
        async with asyncio.TaskGroup() as group:
            inside = group.create_task(front.http.post(CHAT, json=BODY, headers=mine))
            await tokenizer.wait_for_requests(1)
            refused = await front.http.post(CHAT, json=BODY, headers=mine)
            served = group.create_task(front.http.post(CHAT, json=BODY, headers=other))
            await tokenizer.wait_for_requests(2)
            gate.set()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (inside.result().status_code, served.result().status_code) == (200, 200)
        assert (await front.http.post(CHAT, json=BODY, headers=mine)).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_key_that_has_used_up_its_tokens_is_429_until_they_come_back(stream: bool) -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, api_key=(KEY, HASHED), max_tokens_per_minute_per_key=1) as front,
    ):
        mine = {"authorization": f"Bearer {KEY}"}
        other = {"authorization": "Bearer sk-two"}
        body = BODY | {"stream": stream, "max_tokens": 5}
        first = await front.http.post(CHAT, json=body, headers=mine)
        assert first.status_code == 200  # 2 prompt tokens and 4 of the answer: 5 too many
        refused = await front.http.post(CHAT, json=body, headers=mine)
        assert refused.status_code == 429
        assert 240 <= int(refused.headers["retry-after"]) <= 300
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await front.http.post(CHAT, json=body, headers=other)).status_code == 200


async def test_the_client_s_request_id_comes_back_and_ours_otherwise(front: Front) -> None:
    for path in ("/health", "/no-such-route"):
        response = await front.http.get(path, headers={"X-Request-Id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert (await front.http.get(path)).headers["x-request-id"].startswith("req-")
    response = await front.http.get("/health", headers={"X-Request-Id": "a b"})
    assert response.headers["x-request-id"].startswith("req-")


async def test_the_client_s_trace_context_goes_down_the_line(front: Front) -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await front.http.post(CHAT, json=BODY, headers={"traceparent": parent, "tracestate": "k=v"})
    await front.http.post(CHAT, json=BODY, headers={"traceparent": "garbage"})
    traced, untraced = front.tokenizer.requests
    assert (traced.trace.traceparent, traced.trace.tracestate) == (parent, "k=v")
    assert not untraced.HasField("trace")


async def test_a_stopping_gateway_finishes_what_is_inside_and_takes_nothing_new(
    front: Front,
) -> None:
    gate = asyncio.Event()
    front.tokenizer.script = Script(gate=gate)
    async with asyncio.TaskGroup() as group:
        inside = group.create_task(front.chat(stream=True))
        await front.tokenizer.wait_for_requests(1)
        stopping = group.create_task(front.server.stop())
        await front.until_health(503)
        refused = await front.chat()
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        gate.set()
        response: httpx.Response = await inside
        await stopping
    assert response.text.endswith("data: [DONE]\n\n")


async def test_a_body_that_does_not_come_does_not_hold_up_the_stop(front: Front) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    while (await front.http.get("/load")).json() != {"server_load": 1}:
        await asyncio.sleep(0.01)
    front.server.drain_timeout_s = 0.1
    await front.server.stop()
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    writer.close()
    await writer.wait_closed()


async def test_who_is_left_after_the_drain_time_gets_an_error(front: Front) -> None:
    front.server.drain_timeout_s = 0.1
    front.tokenizer.script = Script(gate=asyncio.Event())
    async with asyncio.TaskGroup() as group:
        streamed = group.create_task(front.chat(stream=True))
        whole = group.create_task(front.chat())
        await front.tokenizer.wait_for_requests(2)
        group.create_task(front.server.stop())
        last = (await streamed).text.strip().splitlines()[-1]
        assert '"code":"unavailable"' in last
        assert (await whole).status_code == 503
