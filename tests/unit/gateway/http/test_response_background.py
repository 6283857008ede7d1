"""Responses in the background: made though nobody waits, read again, cancelled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from services.common.errors import RequestFailed, Unavailable
from tests.fakes.tokenizer import MODEL, FakeTokenizer, Script
from tests.unit.gateway.desk import named_events
from tests.unit.gateway.http.conftest import Front, gateway
from tests.unit.gateway.http.test_openai_python import async_client

WITHIN_S = 600
SLOW = Script(tokens=("a",) * 10_000, pace_s=0.01)


async def begin(front: Front, **fields: Any) -> str:
    """The id of a response that is made in the background."""
    reply = await front.respond(background=True, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["status"] == "queued" and reply.json()["background"] is True
    return str(reply.json()["id"])


async def get(front: Front, response_id: str) -> dict[str, Any]:
    """A response."""
    reply = await front.http.get(f"/v1/responses/{response_id}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def until_ended(front: Front, response_id: str) -> dict[str, Any]:
    """A response once it has ended; polling is what the API offers."""
    async with asyncio.timeout(WITHIN_S):
        while (found := await get(front, response_id))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return found


async def test_it_is_queued_then_made_and_found(front: Front) -> None:
    gate = asyncio.Event()
    front.tokenizer.script = Script(gate=gate)
    response_id = await begin(front)
    await front.tokenizer.wait_for_deltas(1)
    assert (await get(front, response_id))["status"] in ("queued", "in_progress")
    gate.set()
    found = await until_ended(front, response_id)
    assert found["status"] == "completed"
    assert found["output"][0]["content"][0]["text"] == "Hello, world!"
    items = await front.http.get(f"/v1/responses/{response_id}/input_items")
    assert items.json()["data"][0]["content"][0]["text"] == "Hi"
    following = await front.respond("more", previous_response_id=response_id)
    assert following.json()["status"] == "completed"
    assert front.tokenizer.num_cancelled == 0


async def test_nothing_goes_on_from_one_that_has_not_ended(front: Front) -> None:
    front.tokenizer.script = SLOW
    response_id = await begin(front)
    refused = await front.respond("more", previous_response_id=response_id)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "previous_response_id"


async def test_it_shows_as_much_as_there_is(front: Front) -> None:
    front.tokenizer.script = SLOW
    response_id = await begin(front)
    await front.tokenizer.wait_for_deltas(5)
    async with asyncio.timeout(WITHIN_S):
        while not (found := await get(front, response_id))["output"]:
            await asyncio.sleep(0.01)
    assert found["status"] == "in_progress" and found["usage"] is None
    assert found["output"][0]["content"][0]["text"].startswith("a")


async def test_cancelling_ends_the_generation_and_may_be_repeated(front: Front) -> None:
    front.tokenizer.script = SLOW
    response_id = await begin(front)
    await front.tokenizer.wait_for_deltas(5)
    async with async_client(front) as client:
        first = await client.responses.cancel(response_id)
        assert first.status == "cancelled"
        async with asyncio.timeout(WITHIN_S):
            await front.tokenizer.wait_idle()
        assert front.tokenizer.num_cancelled == 1
        assert await client.responses.cancel(response_id) == first
        assert await client.responses.retrieve(response_id) == first
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.responses.create(
                model=MODEL, input="more", previous_response_id=response_id
            )


async def test_cancelling_before_the_first_token_works_too(front: Front) -> None:
    front.tokenizer.script = Script(gate=asyncio.Event())
    response_id = await begin(front)
    cancelled = await front.http.post(f"/v1/responses/{response_id}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    async with asyncio.timeout(WITHIN_S):
        await front.tokenizer.wait_idle()


async def test_what_is_not_in_the_background_cannot_be_cancelled(front: Front) -> None:
    response_id = (await front.respond()).json()["id"]
    refused = await front.http.post(f"/v1/responses/{response_id}/cancel")
    assert refused.status_code == 400
    assert "background" in refused.json()["error"]["message"]
    missing = await front.http.post("/v1/responses/resp_no/cancel")
    assert missing.status_code == 404


async def test_deleting_cancels(front: Front) -> None:
    front.tokenizer.script = SLOW
    response_id = await begin(front)
    await front.tokenizer.wait_for_deltas(5)
    deleted = await front.http.delete(f"/v1/responses/{response_id}")
    assert deleted.json() == {"id": response_id, "object": "response", "deleted": True}
    async with asyncio.timeout(WITHIN_S):
        await front.tokenizer.wait_idle()
    assert (await front.http.get(f"/v1/responses/{response_id}")).status_code == 404


@pytest.mark.parametrize(
    "script",
    [
        Script(failure=RequestFailed("NaN")),
        Script(refusal=Unavailable("loading")),
        Script(breaks_after=2),
    ],
    ids=["failure", "refusal", "broken off"],
)
async def test_a_failure_is_a_failed_response(front: Front, script: Script) -> None:
    front.tokenizer.script = script
    found = await until_ended(front, await begin(front))
    assert found["status"] == "failed"
    assert found["error"]["code"] == "server_error" and found["error"]["message"]


async def test_its_stream_is_queued_first_and_may_be_read_again_from_any_event(
    front: Front,
) -> None:
    reply = await front.respond(background=True, stream=True)
    events = named_events(reply.content)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert [event["response"]["status"] for event in events[:3]] == [
        *("queued", "queued", "in_progress")
    ]
    assert kinds[-1] == "completed"
    path = f"/v1/responses/{events[0]['response']['id']}"
    assert (await front.http.get(path, params={"stream": "true"})).content == reply.content
    rest = await front.http.get(path, params={"stream": "true", "starting_after": "6"})
    assert rest.content and reply.content.endswith(rest.content)
    assert json.loads(rest.text.split("data: ")[1].split("\n")[0])["sequence_number"] == 7
    past = await front.http.get(path, params={"stream": "true", "starting_after": "99"})
    assert past.status_code == 200 and past.content == b""


async def test_a_reader_that_goes_ends_nothing_and_another_reads_on(front: Front) -> None:
    gate = asyncio.Event()
    front.tokenizer.script = Script(gate=gate)
    body = {"model": MODEL, "input": "Hi", "background": True, "stream": True}
    async with front.http.stream("POST", "/v1/responses", json=body) as reply:
        text = ""
        async for piece in reply.aiter_text():
            text += piece
            if "response.in_progress" in text:
                break
    response_id = json.loads(text.split("data: ")[1].split("\n")[0])["response"]["id"]
    async with async_client(front) as client:
        stream = await client.responses.retrieve(response_id, stream=True, starting_after=2)
        gate.set()
        events = [event async for event in stream]
    assert events[0].sequence_number == 3
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hello, world!"
    assert front.tokenizer.num_cancelled == 0


async def test_a_cancelled_stream_ends_with_an_error(front: Front) -> None:
    front.tokenizer.script = SLOW

    async def read() -> httpx.Response:
        return await front.respond(background=True, stream=True)

    async with asyncio.TaskGroup() as group:
        reading = group.create_task(read())
        await front.tokenizer.wait_for_deltas(5)
        (request,) = front.tokenizer.requests
        await front.http.post(f"/v1/responses/{request.key.request_id}/cancel")
    last = named_events((await reading).content)[-1]
    assert (last["type"], last["code"]) == ("error", "cancelled")


async def test_only_what_was_streamed_in_the_background_is_streamed_again(front: Front) -> None:
    plain = (await front.respond()).json()["id"]
    polled = (await until_ended(front, await begin(front)))["id"]
    for response_id in (plain, polled):
        refused = await front.http.get(f"/v1/responses/{response_id}", params={"stream": "true"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"
    for query in ({"stream": "perhaps"}, {"starting_after": "-1"}):
        refused = await front.http.get(f"/v1/responses/{plain}", params=query)
        assert refused.status_code == 400 and refused.json()["error"]["param"] in query


async def test_it_has_to_be_stored(front: Front) -> None:
    refused = await front.respond(background=True, store=False)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "background"


async def test_it_takes_a_place_of_its_key_until_it_ends() -> None:
    async with (
        FakeTokenizer(SLOW).serving() as tokenizer,
        gateway(
            tokenizer,
            api_key=("k",),
            max_in_flight_per_key=1,
            headers={"authorization": "Bearer k"},
        ) as front,
    ):
        response_id = await begin(front)
        refused = await front.respond()
        assert refused.status_code == 429
        assert (await front.http.get("/load")).json() == {"server_load": 1}
        await front.http.post(f"/v1/responses/{response_id}/cancel")
        assert (await front.http.get("/load")).json() == {"server_load": 0}
        tokenizer.script = Script()
        assert (await front.respond()).status_code == 200


async def test_another_key_neither_finds_nor_cancels_it() -> None:
    async with (
        FakeTokenizer(SLOW).serving() as tokenizer,
        gateway(
            tokenizer, api_key=("one", "two"), headers={"authorization": "Bearer one"}
        ) as front,
    ):
        response_id = await begin(front)
        theirs = {"authorization": "Bearer two"}
        path = f"/v1/responses/{response_id}"
        for method, where in (("GET", path), ("POST", path + "/cancel"), ("DELETE", path)):
            refused = await front.http.request(method, where, headers=theirs)
            assert refused.status_code == 404
        assert (await get(front, response_id))["status"] in ("queued", "in_progress")


async def test_a_gateway_that_stops_waits_for_it_and_cuts_it_off_at_last() -> None:
    async with (
        FakeTokenizer(SLOW).serving() as tokenizer,
        gateway(tokenizer) as front,
    ):
        front.server.drain_timeout_s = 0.2
        await begin(front)
        await tokenizer.wait_for_deltas(5)
        await front.server.stop()
        async with asyncio.timeout(WITHIN_S):
            await tokenizer.wait_idle()
        assert tokenizer.num_cancelled == 1
