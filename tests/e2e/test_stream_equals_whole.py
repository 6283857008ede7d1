"""Whatever field a request uses, its streamed answer joins to the whole one: the whole system."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from tests.e2e.system import DONE, System

SCHEMA = {
    "type": "object",
    "properties": {"ß": {"enum": ["东京", True]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["ß", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 7, "n": 2}

COMMON: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "drawn": DRAWN | {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": DRAWN
    | {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "stop": DRAWN | {"stop": list("aeiou "), "include_stop_str_in_output": True, "min_tokens": 2},
    "stop tokens": DRAWN | {"stop_token_ids": list(range(60, 180))},
    "masks": DRAWN
    | {"logit_bias": {"70": 5}, "allowed_token_ids": list(range(60, 120)), "bad_words": ["a"]},
    "specials": {
        "logit_bias": {"1": 100, "2": 100},
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
    "ids": DRAWN | {"return_token_ids": True, "priority": 1, "cache_salt": "s"},
    "repetition": {
        "logit_bias": {"70": 100},
        "temperature": 0,
        "repetition_detection": {"max_pattern_size": 2, "min_count": 4},
    },
    "a form": DRAWN | {"response_format": FORMAT, "max_tokens": 200},
    "a choice": DRAWN | {"structured_outputs": {"choice": ["🌶 x", "日本語", "e\u0301"]}},
    "cut": DRAWN | {"max_tokens": 1, "truncate_prompt_tokens": 3},
}
CHAT: dict[str, dict[str, Any]] = COMMON | {
    "log-probabilities": DRAWN
    | {"logprobs": True, "top_logprobs": 3, "return_tokens_as_token_ids": True},
    "required": DRAWN | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200},
    "parallel": DRAWN
    | {
        "tools": [TOOL],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [NAMED]},
        },
        "parallel_tool_calls": True,
        "logprobs": True,
    },
    "named": DRAWN | {"tools": [TOOL], "tool_choice": NAMED, "max_completion_tokens": 200},
    "calls or a form": DRAWN | {"tools": [TOOL], "response_format": FORMAT, "max_tokens": 200},
    "a thought": {
        "structured_outputs": {"choice": ["<think>a b</think>c d"]},
        "include_reasoning": True,
        "max_tokens": 60,
        "logprobs": True,
    },
    "continued": DRAWN
    | {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "the template": DRAWN
    | {
        "chat_template_kwargs": {"x": 1},
        "reasoning_effort": "low",
        "modalities": ["text"],
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = COMMON | {
    "log-probabilities": DRAWN | {"logprobs": 3, "return_tokens_as_token_ids": True},
    "an echo": DRAWN | {"echo": True, "logprobs": 1, "prompt": ["日本語 x", "Hello"]},
    "an echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "ids as prompts": DRAWN | {"prompt": [[70, 71], [72]], "add_special_tokens": False},
}
# How a reply is sent or found, or not part of a stream; each has tests of its own.
OTHER = {"model", "stream", "stream_options", "prompt_logprobs", "chat_template"}
ROUTES: dict[str, tuple[type, dict[str, dict[str, Any]], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        CHAT,
        {"messages": [{"role": "user", "content": "Hello"}]},
    ),
    "/v1/completions": (CompletionRequest, COMPLETIONS, {"prompt": "Hello"}),
}
CASES = [
    pytest.param(path, base | fields, id=f"{path.split('/')[2]} {name}")
    for path, (_, cases, base) in ROUTES.items()
    for name, fields in cases.items()
]


@pytest.fixture(scope="module")
def reader(tiny_chat_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The system with parsers that look for calls and thoughts."""
    log_file = tmp_path_factory.mktemp("serve") / "parsers.txt"
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--dtype", "float32")
    blocks = ("--max-model-len", "1024", "--num-gpu-blocks-override", "512")
    with System(tiny_chat_dir, *flags, *blocks, log_file=log_file) as system:
        yield system.until_ready()


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_that_works_is_tried(path: str) -> None:
    model, cases, base = ROUTES[path]
    fields = model.model_fields  # type: ignore[attr-defined]
    works = {
        name
        for name, field in fields.items()
        if not (field.description or "").startswith("Accepted")
    }
    tried = {name for fields in cases.values() for name in fields} | base.keys()
    assert works - OTHER - tried == set()


@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_stream_joins_to_the_whole_reply(reader: System, path: str, body: dict[str, Any]) -> None:
    body = {"max_tokens": 12} | body
    whole = httpx.post(reader.url + path, json=body, timeout=300, trust_env=False)
    assert whole.status_code == 200, whole.text
    options = {"include_usage": True, "continuous_usage_stats": True}
    with reader.events(path, **body, stream=True, stream_options=options) as events:
        *chunks, last, done = events
    assert done is DONE
    reply = whole.json()
    assert joined_of(chunks) == {choice["index"]: said_by(choice) for choice in reply["choices"]}
    assert last["choices"] == []
    # What the second request finds in the cache differs, and only that.
    for usage in (last["usage"], reply["usage"]):
        del usage["prompt_tokens_details"]
    assert last["usage"] == reply["usage"]


def said_by(choice: dict[str, Any]) -> dict[str, Any]:
    """What a choice of a whole reply says, in the shape of ``joined_of``."""
    message = choice.get("message", {})
    calls = [call["function"] for call in message.get("tool_calls", [])]
    logprobs = choice["logprobs"] or {}
    return {
        "text": choice.get("text", message.get("content")) or "",
        "reasoning": message.get("reasoning", ""),
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "finish": [choice["finish_reason"], choice["stop_reason"]],
        "ids": choice.get("token_ids", []),
        "logprobs": {name: column for name, column in logprobs.items() if column},
    }


def joined_of(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Index of a choice → what its chunks say together."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        fresh = {"text": "", "reasoning": "", "calls": [], "ids": [], "logprobs": {}}
        said = found.setdefault(choice["index"], fresh)
        delta = choice.get("delta", {})
        said["text"] += choice.get("text", delta.get("content")) or ""
        said["reasoning"] += delta.get("reasoning", "")
        said["ids"] += choice.get("token_ids", [])
        for call in delta.get("tool_calls", []):
            if call["index"] == len(said["calls"]):
                said["calls"].append([call["function"]["name"], ""])
            said["calls"][call["index"]][1] += call["function"]["arguments"]
        for name, column in (choice["logprobs"] or {}).items():
            if column:
                said["logprobs"].setdefault(name, []).extend(column)
        if choice["finish_reason"] is not None:
            assert "finish" not in said
            said["finish"] = [choice["finish_reason"], choice["stop_reason"]]
    return found
