"""Whatever a request asks for, its streamed answer joins to the whole one."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.pb import common_pb2 as pb
from tests.fakes.tokenizer import Script
from tests.unit.gateway.desk import Desk, planning

WEATHER = {"type": "function", "function": {"name": "get_w", "parameters": {}}}
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
CHAT_FEATURES: dict[str, dict[str, Any]] = {
    "free calls": {"tools": [WEATHER]},
    "required calls": {"tools": [WEATHER], "tool_choice": "required", "n": 2},
    "a named call": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_w"}},
    },
    "no thought shown": {"include_reasoning": False},
}
CALL = '{"name": "get_w", "arguments": {}}'
SCRIPTS = {
    "token by token": Script(),
    "several tokens per delta": Script(tokens_per_delta=3),
    "bytes of characters": Script(tokens=(b"\xe6\x97", b"\xa5", "本", b"\xf0\x9f", b"\x8c\xb6")),
    "nothing": Script(tokens=()),
    "cut inside a character": Script(tokens=(b"\xf0\x9f",), reason=pb.FINISH_REASON_LENGTH),
    "stopped by a string": Script(stop="END", cached_tokens=1),
    "calls": Script(tokens=tuple(f"So: <tool_call>{CALL}</tool_call> <tool_call>{CALL}")),
    "enforced calls": Script(tokens=(f"[{CALL}", ", ", f"{CALL}]")),
    "a thought": Script(
        tokens=("<th", "ink>", "Hm.", "</", "think>", "\n", "Yes."), cached_tokens=1
    ),
    "a thought that is cut": Script(tokens=("<think>", "Hm"), reason=pb.FINISH_REASON_LENGTH),
}
COMMON = [
    pytest.param(kind, FEATURES[name], id=f"{kind} {name}")
    for kind in ("chat", "completions")
    for name in FEATURES
]
CHAT_ONLY = [pytest.param("chat", CHAT_FEATURES[name], id=name) for name in CHAT_FEATURES]


def whole_of(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """What each choice of a reply says, and how it ended."""
    return [
        (_said(choice["message"]) if "message" in choice else {"text": choice["text"]})
        | {name: choice[name] for name in ("finish_reason", "stop_reason")}
        | {"token_ids": choice.get("token_ids", [])}
        for choice in reply["choices"]
    ]


def _said(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {
        "text": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": [(call["name"], call["arguments"]) for call in calls],
    }


def joined_of(chunks: list[Any], num_choices: int) -> list[dict[str, Any]]:
    """The same out of a stream."""
    joined = [_Joined() for _ in range(num_choices)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]].add(choice)
    return [one.said for one in joined]


class _Joined:
    """One choice of a stream."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {"text": "", "token_ids": []}

    def add(self, choice: dict[str, Any]) -> None:
        said = self.said
        if "delta" in choice:
            self._add_delta(choice["delta"])
        else:
            said["text"] += choice["text"]
        said["token_ids"] += choice.get("token_ids", [])
        if choice["finish_reason"] is not None:
            assert "finish_reason" not in said, "a second finish"
            said |= {name: choice[name] for name in ("finish_reason", "stop_reason")}

    def _add_delta(self, delta: dict[str, Any]) -> None:
        said = self.said
        said["text"] += delta.get("content", "")
        said["reasoning"] = said.get("reasoning", "") + delta.get("reasoning", "")
        calls = said.setdefault("calls", [])
        for part in delta.get("tool_calls", []):
            if part["index"] == len(calls):
                calls.append((part["function"]["name"], ""))
            name, arguments = calls[part["index"]]
            calls[part["index"]] = (name, arguments + part["function"]["arguments"])


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
@pytest.mark.parametrize(("kind", "fields"), COMMON + CHAT_ONLY)
def test_a_stream_joins_to_the_whole_reply(
    desk: Desk, kind: str, fields: dict[str, Any], script: Script
) -> None:
    desk.script = script
    desk.context = planning(tool_calls="hermes", reasoning="qwen3")
    whole_reply = desk.chat if kind == "chat" else desk.complete
    stream = desk.chat_events if kind == "chat" else desk.complete_events
    plain = {name: value for name, value in fields.items() if name != "stream_options"}
    whole = whole_reply(**plain)
    *chunks, done = stream(**fields)
    assert done == "[DONE]"
    assert joined_of(chunks, len(whole["choices"])) == whole_of(whole)
    if "stream_options" in fields:
        assert chunks[-1]["usage"] == whole["usage"]
