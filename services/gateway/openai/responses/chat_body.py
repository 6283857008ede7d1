"""A request for a response as the body of a chat, whose rules it shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.openai.responses.fields import LOGPROBS
from services.gateway.openai.responses.items import Item
from services.gateway.openai.responses.schema import ResponseRequest
from services.gateway.openai.responses.tools import chat_tool_choice, chat_tools
from services.gateway.openai.responses.transcript import messages_of
from services.gateway.openai.schema import CommonBody

_PASSED_ON = (*CommonBody.model_fields, "chat_template", "chat_template_kwargs")

JsonObject = dict[str, Any]


def chat_body(body: ResponseRequest, raw: JsonObject, items: Sequence[Item]) -> JsonObject:
    """The body of the chat that has the same answer.

    Args:
        body: Types checked.
        raw: The same as it came.
        items: Of the whole conversation; no references.

    Raises:
        InvalidRequest: Names the field.
    """
    messages = messages_of(body.instructions, items)
    if not messages:
        raise InvalidRequest("input says nothing: thoughts alone are none", param="input")
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    chat: JsonObject = {name: raw[name] for name in _PASSED_ON if name in raw}
    chat |= {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": wants_logprobs,
        "top_logprobs": body.top_logprobs if wants_logprobs else None,
        "tools": chat_tools(body.tools or ()) or None,
        "tool_choice": chat_tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    return chat


def _response_format(body: ResponseRequest) -> JsonObject | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema_ is None:
        raise InvalidRequest(
            "text.format.schema is required with type json_schema", param="text.format.schema"
        )
    schema = {"name": wanted.name or "", "schema": wanted.schema_}
    return {"type": wanted.type, "json_schema": schema}
