"""An example of every reply, for the documentation; the bodies' examples are with the bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from services.gateway.openai.chunks import ChatCompletionChunk, CompletionChunk
from services.gateway.openai.embeddings import EmbeddingReply
from services.gateway.openai.render import RenderReply
from services.gateway.openai.replies import (
    CacheResetReply,
    ChatCompletion,
    Completion,
    ErrorReply,
    HealthReply,
    LiveReply,
    LoadReply,
    ModelList,
    ModelObject,
    NotReadyReply,
    VersionReply,
)
from services.gateway.openai.responses.replies import (
    DeletedResponse,
    InputItemList,
    ResponseEvent,
    ResponseObject,
)
from services.gateway.openai.tokenize import DetokenizeReply, TokenizeReply

_HEAD: dict[str, Any] = {"created": 1700000000, "model": "smollm2"}
_CHAT_HEAD = _HEAD | {"id": "chatcmpl-0123456789abcdef01234567"}
_COMPLETION_HEAD = _HEAD | {"id": "cmpl-0123456789abcdef01234567"}
_MODEL: dict[str, Any] = {
    "id": "smollm2",
    "object": "model",
    "created": 1700000000,
    "owned_by": "sluiceway",
    "root": "smollm2",
    "parent": None,
    "max_model_len": 8192,
}
_NOT_READY: dict[str, Any] = {
    "message": "worker-a is loading (load weights, 40 %)",
    "type": "service_unavailable_error",
    "param": None,
    "code": "unavailable",
}


_RESPONSE_ID = "resp_0123456789abcdef01234567"
_MESSAGE: dict[str, Any] = {
    "id": "msg_0123456789abcdef01234567",
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [
        {
            "type": "output_text",
            "text": "The capital of France is Paris.",
            "annotations": [],
            "logprobs": [],
        }
    ],
}
_RESPONSE: dict[str, Any] = {
    "id": _RESPONSE_ID,
    "object": "response",
    "created_at": 1700000000,
    "completed_at": 1700000001,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "model": "smollm2",
    "output": [_MESSAGE],
    "usage": {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 45,
    },
    "background": False,
    "instructions": "Answer in one sentence.",
    "max_output_tokens": 32,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 0.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_INPUT_ITEM: dict[str, Any] = {
    "id": "msg_76543210fedcba9876543210",
    "type": "message",
    "role": "user",
    "status": "completed",
    "content": [{"type": "input_text", "text": "What is the capital of France?"}],
}


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


EXAMPLES: dict[type[BaseModel], dict[str, Any]] = {
    ChatCompletion: _CHAT_HEAD
    | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "The capital of France is Paris.",
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": _usage(37, 8),
    },
    ChatCompletionChunk: _CHAT_HEAD
    | {
        "object": "chat.completion.chunk",
        "choices": [
            {"index": 0, "delta": {"content": "The"}, "logprobs": None, "finish_reason": None}
        ],
    },
    Completion: _COMPLETION_HEAD
    | {
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": " 5 6 7 8 9",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": _usage(7, 10),
    },
    CompletionChunk: _COMPLETION_HEAD
    | {
        "object": "text_completion",
        "choices": [{"index": 0, "text": " 5", "logprobs": None, "finish_reason": None}],
    },
    ResponseObject: _RESPONSE,
    ResponseEvent: {
        "type": "response.output_text.delta",
        "sequence_number": 4,
        "item_id": _MESSAGE["id"],
        "output_index": 0,
        "content_index": 0,
        "delta": "The",
        "logprobs": [],
    },
    InputItemList: {
        "object": "list",
        "data": [_INPUT_ITEM],
        "first_id": _INPUT_ITEM["id"],
        "last_id": _INPUT_ITEM["id"],
        "has_more": False,
    },
    DeletedResponse: {"id": _RESPONSE_ID, "object": "response", "deleted": True},
    EmbeddingReply: {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.6, -0.8, 0.0]},
            {"object": "embedding", "index": 1, "embedding": [0.0, 0.8, -0.6]},
        ],
        "model": "smollm2",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    },
    RenderReply: {
        "model": "smollm2",
        "prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "token_ids": [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198],
    },
    TokenizeReply: {
        "count": 3,
        "max_model_len": 8192,
        "tokens": [33, 216, 34],
        "token_strs": None,
    },
    DetokenizeReply: {"prompt": "1 2"},
    ModelObject: _MODEL,
    ModelList: {"object": "list", "data": [_MODEL]},
    HealthReply: {"status": "ok"},
    NotReadyReply: {
        "error": _NOT_READY,
        "status": "not_ready",
        "phase": "load weights",
        "percent": 40,
    },
    LiveReply: {"status": "alive"},
    LoadReply: {"server_load": 3},
    CacheResetReply: {"engines_reset": 1, "engines_busy": 1},
    VersionReply: {"version": "0.1.0"},
    ErrorReply: {
        "error": {
            "message": "temperature must be at least 0, got -1",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": None,
        }
    },
}
