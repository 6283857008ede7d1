"""Bodies: bounded, strict JSON, objects only."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.tokenizer import MODEL, FakeTokenizer
from tests.unit.gateway.http.conftest import Front, gateway

PATH = "/v1/chat/completions"


@pytest.mark.parametrize("field", ["content", "stop", "user", "model"])
async def test_a_lone_surrogate_anywhere_is_a_400(front: Front, field: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    if field == "content":
        body["messages"] = [{"role": "user", "content": "LONE"}]
    else:
        body[field] = "LONE"
    raw = json.dumps(body).replace("LONE", "x\\ud83d")
    response = await _post(front, raw.encode())
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_huge_integers_are_a_400_naming_the_field(front: Front) -> None:
    raw = b'{"messages":[{"role":"user","content":"Hi"}],"seed":1%s}' % (b"0" * 400)
    response = await _post(front, raw)
    assert response.status_code == 400
    assert (await front.chat(seed=2**64)).json()["error"]["param"] == "seed"


async def test_a_body_that_is_too_large_is_a_413_even_while_it_is_still_sent() -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, max_body_bytes=10_000) as front,
    ):
        response = await front.chat(messages=[{"role": "user", "content": "a" * 30_000}])
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await front.chat()).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_other_content_types_are_refused(front: Front, kind: str) -> None:
    response = await front.http.post(PATH, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.x+json"])
async def test_json_content_types_are_taken(front: Front, kind: str) -> None:
    raw = b'{"messages":[{"role":"user","content":"Hi"}]}'
    response = await front.http.post(PATH, content=raw, headers={"content-type": kind})
    assert response.status_code == 200


async def _post(front: Front, raw: bytes) -> httpx.Response:
    return await front.http.post(PATH, content=raw, headers={"content-type": "application/json"})
