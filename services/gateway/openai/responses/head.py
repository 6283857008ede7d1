"""The fields of a response that say what was asked for."""

from __future__ import annotations

from typing import Any

from services.gateway.openai.conversation import Conversation
from services.gateway.openai.responses.schema import ResponseRequest, TextFormat

JsonObject = dict[str, Any]


def response_head(body: ResponseRequest, talk: Conversation, *, created_at: int) -> JsonObject:
    """The fields of a response that never change.

    Args:
        body: The request.
        talk: What became of it.
        created_at: Unix seconds.
    """
    request = talk.request
    is_parallel = talk.tools.is_parallel if talk.tools is not None else True
    text_format = None if body.text is None else body.text.format
    return {
        "id": request.request_id,
        "object": "response",
        "created_at": created_at,
        "model": request.model,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": is_parallel,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"} if text_format is None else _told(text_format)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": talk.num_top or 0,
        "top_p": request.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _told(wanted: TextFormat) -> JsonObject:
    return wanted.model_dump(by_alias=True, exclude_none=True)
