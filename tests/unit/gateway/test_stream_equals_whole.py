"""Whatever a request asks for, its streamed answer joins to the whole one."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.pb import common_pb2 as pb
from tests.fakes.tokenizer import Script
from tests.unit.gateway.desk import Desk

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 3},
    "length": {"max_tokens": 2},
    "token ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {
        "n": 2,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "constraint": {"structured_outputs": {"choice": ["Hello, world!"]}},
}
SCRIPTS = {
    "token by token": Script(),
    "several tokens per delta": Script(tokens_per_delta=3),
    "bytes of characters": Script(tokens=(b"\xe6\x97", b"\xa5", "本", b"\xf0\x9f", b"\x8c\xb6")),
    "nothing": Script(tokens=()),
    "cut inside a character": Script(tokens=(b"\xf0\x9f",), reason=pb.FINISH_REASON_LENGTH),
    "stopped by a string": Script(stop="END", cached_tokens=1),
}
COMMON = [pytest.param(FEATURES[name], id=name) for name in FEATURES]


def whole_of(reply: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(text, finish, what stopped it, token ids) of each choice."""
    return [
        (
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["finish_reason"],
            choice["stop_reason"],
            choice.get("token_ids", []),
        )
        for choice in reply["choices"]
    ]


def joined_of(chunks: list[Any], num_choices: int) -> list[tuple[Any, ...]]:
    """The same out of a stream."""
    texts = [""] * num_choices
    ids: list[list[int]] = [[] for _ in texts]
    ends: list[tuple[Any, Any]] = [(None, None)] * num_choices
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] += (
                choice["text"] if "text" in choice else choice["delta"].get("content", "")
            )
            ids[index] += choice.get("token_ids", [])
            if choice["finish_reason"] is not None:
                assert ends[index] == (None, None), "a second finish"
                ends[index] = (choice["finish_reason"], choice["stop_reason"])
    return [(text, *end, i) for text, end, i in zip(texts, ends, ids, strict=True)]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
@pytest.mark.parametrize("fields", COMMON)
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_stream_joins_to_the_whole_reply(
    desk: Desk, kind: str, fields: dict[str, Any], script: Script
) -> None:
    desk.script = script
    whole_reply = desk.chat if kind == "chat" else desk.complete
    stream = desk.chat_events if kind == "chat" else desk.complete_events
    plain = {name: value for name, value in fields.items() if name != "stream_options"}
    whole = whole_reply(**plain)
    *chunks, done = stream(**fields)
    assert done == "[DONE]"
    assert joined_of(chunks, len(whole["choices"])) == whole_of(whole)
    if "stream_options" in fields:
        assert chunks[-1]["usage"] == whole["usage"]
