"""POST /v1/embeddings in front of a fake tokenizer, whose vectors are (sum of the ids, 3, 4)."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import httpx
import openai
import pytest

from services.common.errors import ContextLengthExceeded, RequestFailed, Unavailable
from services.common.pb import common_pb2
from services.gateway.embeddings_exchange import MAX_AT_ONCE
from tests.fakes.tokenizer import MODEL, FakeTokenizer, Script
from tests.unit.gateway.http.conftest import Front, gateway


async def embed(front: Front, given: Any = "one two", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": given} | fields
    return await front.http.post("/v1/embeddings", json=body)


async def vectors(front: Front, given: Any, **fields: Any) -> list[Any]:
    response = await embed(front, given, **fields)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


@pytest.mark.parametrize(
    ("given", "sums"),
    [
        ([5, 6], [11]),
        ([[5, 6], [7]], [11, 7]),
        ([[7]], [7]),
    ],
)
async def test_token_ids_go_through_as_they_are(front: Front, given: Any, sums: list[int]) -> None:
    assert await vectors(front, given) == [[total, 3.0, 4.0] for total in sums]


async def test_texts_come_back_in_order_with_what_was_counted(front: Front) -> None:
    response = await embed(front, ["one two", "one", "one two three"], user="me")
    reply = response.json()
    ids = front.tokenizer.vocabulary.encode
    assert [entry["embedding"][0] for entry in reply["data"]] == [
        sum(ids(text)) for text in ("one two", "one", "one two three")
    ]
    assert reply["object"] == "list" and reply["model"] == MODEL
    assert reply["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert await vectors(front, "one two") == [reply["data"][0]["embedding"]]


async def test_base64_is_the_same_vector_in_little_endian_float32(front: Front) -> None:
    (encoded,) = await vectors(front, [[5, 6]], encoding_format="base64")
    assert struct.unpack("<3f", base64.b64decode(encoded)) == (11.0, 3.0, 4.0)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_dimensions_keep_the_first_elements_and_scale_them_again(
    front: Front, encoding_format: str
) -> None:
    (found,) = await vectors(front, [[4]], dimensions=2, encoding_format=encoding_format)
    if encoding_format == "base64":
        found = struct.unpack("<2f", base64.b64decode(found))
    assert list(found) == pytest.approx([0.8, 0.6])
    response = await embed(front, [[4]], dimensions=4)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "dimensions")
    assert "3 elements" in error["message"]


async def test_what_a_tokenizer_is_asked_for(front: Front) -> None:
    await embed(
        front,
        "one",
        truncate_prompt_tokens=5,
        add_special_tokens=False,
        priority=2,
        cache_salt="salt",
    )
    (request,) = front.tokenizer.requests
    assert request.pooling == common_pb2.POOLING_KIND_MEAN
    assert (request.truncate_prompt_tokens, request.priority, request.n) == (5, 2, 1)
    assert not request.add_special_tokens and request.cache_namespace


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["one", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[1], [2000]]}, "input[1][0]"),
        ({"input": [1, "x"]}, "input[1]"),
        ({"input": ["x", 1]}, "input[1]"),
        ({"input": 7}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": "2"}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "priority": 2**40}, "priority"),
        ({"input": "x", "cache_salt": ""}, "cache_salt"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"input": "x", "normalize": False}, "normalize"),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_field(
    front: Front, body: dict[str, Any], param: str
) -> None:
    response = await front.http.post("/v1/embeddings", json={"model": MODEL} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not front.tokenizer.requests


async def test_an_error_from_down_the_line_names_the_input_at_fault(front: Front) -> None:
    front.tokenizer.script = Script(refusal=ContextLengthExceeded("too long", param="prompt"))
    for given, param in ((["x"], "input[0]"), ("x", "input")):
        response = await embed(front, given)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(failure=RequestFailed("NaN")), 500),
        (Script(gives_vectors=False), 500),
        (Script(refusal=Unavailable("no worker")), 503),
    ],
)
async def test_a_failure_of_one_input_is_an_error_and_no_half_reply(
    front: Front, script: Script, status: int
) -> None:
    front.tokenizer.script = script
    response = await embed(front, ["one", "two"])
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


async def test_many_inputs_run_some_at_a_time(front: Front) -> None:
    gate = asyncio.Event()
    front.tokenizer.script = Script(gate=gate)
    asking = asyncio.ensure_future(embed(front, [[i % 900] for i in range(MAX_AT_ONCE + 50)]))
    await front.tokenizer.wait_for_requests(MAX_AT_ONCE)
    await asyncio.sleep(0.2)  # there is no sign that something does not happen
    assert front.tokenizer.num_running == len(front.tokenizer.requests) == MAX_AT_ONCE
    gate.set()
    data = (await asking).json()["data"]
    assert [entry["embedding"][0] for entry in data] == [i % 900 for i in range(MAX_AT_ONCE + 50)]


async def test_a_client_that_leaves_frees_all_its_inputs(front: Front) -> None:
    front.tokenizer.script = Script(gate=asyncio.Event())
    asking = asyncio.ensure_future(embed(front, ["one", "two", "three"]))
    await front.tokenizer.wait_for_requests(3)
    asking.cancel()
    await front.tokenizer.wait_idle()
    assert front.tokenizer.num_cancelled == 3


async def test_a_key_is_needed_and_charged_for_the_tokens() -> None:
    async with (
        FakeTokenizer().serving() as tokenizer,
        gateway(tokenizer, api_key=("k",), max_tokens_per_minute_per_key=4) as front,
    ):
        assert (await embed(front)).status_code == 401
        front.http.headers["authorization"] = "Bearer k"
        assert (await embed(front, "one two three four five")).status_code == 200
        assert (await embed(front)).status_code == 429


async def test_openai_python_reads_them(front: Front) -> None:
    http = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=front.url + "/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        default = await client.embeddings.create(model=MODEL, input=[[5, 6], [7]])  # base64
        plain = await client.embeddings.create(
            model=MODEL, input="one", encoding_format="float", dimensions=2
        )
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model=MODEL, input="")
    assert [entry.embedding for entry in default.data] == [[11, 3, 4], [7, 3, 4]]
    assert default.usage.total_tokens == 3
    assert len(plain.data[0].embedding) == 2
    assert caught.value.param == "input"
