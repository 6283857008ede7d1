"""HTTP as odd clients speak it, written byte by byte."""

from __future__ import annotations

import asyncio
import gzip
import json
import time

import pytest

from services.gateway import http_protocol
from services.gateway.http_protocol import MAX_HEAD_BYTES
from tests.unit.gateway.http.conftest import Front

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
END_WITHIN_S = 60


async def said(front: Front, sent: bytes) -> bytes:
    """Everything that the gateway says on a connection until it hangs up."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(END_WITHIN_S):
        found = await reader.read()
    writer.close()
    await writer.wait_closed()
    return found


def post(body: bytes, *headers: str, is_last: bool = True) -> bytes:
    """A chat request."""
    lines = [f"POST {CHAT} HTTP/1.1", "host: x", "content-type: application/json", *headers]
    lines += [f"content-length: {len(body)}"] if "transfer-encoding: chunked" not in headers else []
    lines += ["connection: close"] if is_last else []
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "path", ["/health", "/live", "/version", "/v1/models", "/metrics", "/docs"]
)
async def test_head_is_get_without_the_body(front: Front, path: str) -> None:
    head, get = await front.http.head(path), await front.http.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(get.content))


async def test_head_of_a_route_that_only_takes_post_is_a_405(front: Front) -> None:
    response = await front.http.head(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
async def test_encoded_bodies_are_refused_by_name(front: Front, coding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": coding}
    response = await front.http.post(CHAT, content=gzip.compress(BODY), headers=headers)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "Content-Encoding" in message and coding in message


async def test_a_body_that_is_said_to_be_far_too_large_is_not_waited_for(front: Front) -> None:
    start = time.monotonic()
    head = post(b"{", "x: y").replace(b"content-length: 1", b"content-length: 99999999999")
    assert (await said(front, head)).startswith(b"HTTP/1.1 413 ")
    assert time.monotonic() - start < END_WITHIN_S / 2


async def test_a_body_may_come_in_chunks_of_any_size(front: Front) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    reply = await said(front, post(chunks, "transfer-encoding: chunked"))
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"Hello, world!" in reply


async def test_requests_in_a_pipeline_are_answered_in_their_order(front: Front) -> None:
    streamed = json.dumps(json.loads(BODY) | {"stream": True}).encode()
    sent = post(streamed, is_last=False) + post(b"[]", is_last=False) + post(BODY)
    first, second, third = (await said(front, sent)).split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ") and b"[DONE]" in first
    assert second.startswith(b"400 ") and b"must be a JSON object" in second
    assert third.startswith(b"200 ") and b'"chat.completion"' in third


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: a\x01b\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "negative length", "a chunk without size", "control characters"],
)
async def test_what_is_no_http_1_is_a_400_in_the_envelope(front: Front, sent: bytes) -> None:
    reply = await said(front, sent)
    assert b"HTTP/1.1 400 " in reply
    assert json.loads(reply.rpartition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


async def test_headers_of_any_usual_size_are_taken(front: Front) -> None:
    for headers in ({"x-long": "a" * 60_000}, {f"x-{i}": "a" for i in range(1000)}):
        assert (await front.http.get("/health", headers=headers)).status_code == 200


async def test_a_head_without_end_is_a_431(front: Front) -> None:
    start = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: "
    reply = await said(front, start.ljust(MAX_HEAD_BYTES + 1, b"a"))
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert b'"invalid_request_error"' in reply


async def test_who_does_not_finish_the_head_is_hung_up_on(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_WITHIN_S", 0.05)
    reply = await said(front, b"GET /health HTTP/1.1\r\nhost: x\r\n")
    assert reply.startswith(b"HTTP/1.1 408 ")
    again = await said(front, post(BODY, is_last=False) + b"GET /hea")
    assert again.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in again
