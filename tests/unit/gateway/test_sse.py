"""Streamed bodies go past the middleware; heads do not."""

from __future__ import annotations

from starlette.types import Message, Receive, Scope, Send

from services.gateway.sse import SEND_BODY, EventStream, SendBodyPast


async def test_heads_go_through_middleware_and_bodies_past_it() -> None:
    seen: list[Message] = []
    sent: list[Message] = []

    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            seen.append(message)
            await send(message)

        stream = EventStream(watched, send_body=scope[SEND_BODY])
        await stream.start()
        await stream.write(b"data: 1\n\n")
        await stream.write(b"")
        await stream.end(b"data: [DONE]\n\n")

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await SendBodyPast(middleware)({"type": "http"}, receive, send)
    assert [message["type"] for message in seen] == ["http.response.start"]
    assert [message.get("body") for message in sent] == [None, b"data: 1\n\n", b"data: [DONE]\n\n"]
    assert [message.get("more_body") for message in sent] == [None, True, False]


async def test_without_a_way_past_bodies_take_the_same_way() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    stream = EventStream(send)
    await stream.start()
    await stream.end(b"data: [DONE]\n\n")
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
