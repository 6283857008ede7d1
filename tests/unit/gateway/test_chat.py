"""POST /v1/chat/completions."""

from __future__ import annotations

from tests.unit.gateway.conftest import Front, events


async def test_a_chat_is_answered_with_text_finish_and_usage(front: Front) -> None:
    response = await front.chat()
    assert response.status_code == 200, response.text
    reply = response.json()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake"
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Hello, world!"
    assert choice["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 4


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_done(front: Front) -> None:
    first, *middle, last, done = events(await front.chat(stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"]["content"] for c in middle] == ["Hello", ",", " world", "!"]
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"
