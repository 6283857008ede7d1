"""An example of every reply, for the documentation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from services.gateway.anthropic.replies import (
    AnthropicErrorReply,
    MessageEvent,
    MessageReplyObject,
    TokenCount,
)

EXAMPLES: dict[type[BaseModel], dict[str, Any]] = {
    MessageReplyObject: {
        "id": "msg_0123456789abcdef01234567",
        "type": "message",
        "role": "assistant",
        "model": "smollm2",
        "content": [{"type": "text", "text": "The capital of France is Paris."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 37,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 8,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    },
    MessageEvent: {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "The"},
    },
    TokenCount: {"input_tokens": 37},
    AnthropicErrorReply: {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "temperature must be in [0, 100], got -1",
        },
    },
}
