"""A request for a message as the body of a chat, whose rules it shares."""

from __future__ import annotations

from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.anthropic.schema import (
    ClientTool,
    ConversationBody,
    JsonFormat,
    MessagesRequest,
    ToolChoice,
)
from services.gateway.anthropic.transcript import chat_messages, ends_with_assistant

_SAME_NAME = ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "stream")

JsonObject = dict[str, Any]


def chat_body(body: MessagesRequest, *, knows_thoughts: bool) -> JsonObject:
    """The body of the chat that has the same answer.

    Args:
        body: Types checked.
        knows_thoughts: Whether the model's thoughts can be told from its answers.

    Raises:
        InvalidRequest: Names the field.
    """
    chat = {name: getattr(body, name) for name in _SAME_NAME}
    return chat | {
        **conversation_body(body, knows_thoughts=knows_thoughts),
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
    }


def conversation_body(body: ConversationBody, *, knows_thoughts: bool) -> JsonObject:
    """The part of it that says what the prompt is, and what the answer shall be.

    Args and errors as ``chat_body``.
    """
    output = body.output_config
    choice = body.tool_choice
    is_continued = ends_with_assistant(body)
    return {
        "model": body.model,
        "messages": chat_messages(body),
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": None if choice is None else _is_parallel(choice),
        "response_format": _format(output.format) if output and output.format else None,
        "reasoning_effort": output.effort if output else None,
        "chat_template_kwargs": _template_kwargs(body, knows_thoughts=knows_thoughts),
        "add_generation_prompt": not is_continued,
        "continue_final_message": is_continued,
    }


def _tool(tool: ClientTool) -> JsonObject:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _tool_choice(choice: ToolChoice) -> object:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
            return {"type": "function", "function": {"name": choice.name}}
        case _:
            return choice.type


def _is_parallel(choice: ToolChoice) -> bool | None:
    is_disabled = choice.disable_parallel_tool_use
    return None if is_disabled is None else not is_disabled


def _format(wanted: JsonFormat) -> JsonObject:
    schema = {"name": "answer", "schema": wanted.schema_}
    return {"type": "json_schema", "json_schema": schema}


def _template_kwargs(body: ConversationBody, *, knows_thoughts: bool) -> JsonObject | None:
    thinking = body.thinking
    if thinking is None or thinking.type == "adaptive":
        return body.chat_template_kwargs
    is_enabled = thinking.type == "enabled"
    if is_enabled and not knows_thoughts:
        raise InvalidRequest(
            "thinking: how this model marks its thoughts is not known here (--reasoning-parser)",
            param="thinking",
        )
    return {"enable_thinking": is_enabled} | (body.chat_template_kwargs or {})
