"""Brings a chat as OpenAI clients send it into the shape that chat templates are written for.

Templates expect what transformers passes them: no ``None`` values, text as one string (unless the
template itself loops over parts), the arguments of tool calls as an object. Refuses what is not a
chat.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidRequest

JsonObject = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")


def parse_messages(messages_json: str, *, keep_parts: bool) -> list[JsonObject]:
    """Read and normalise the messages of a chat.

    Args:
        messages_json: A JSON list of messages.
        keep_parts: Whether the template takes a list of parts as content; else their texts are
            joined with line breaks.

    Raises:
        InvalidRequest: Not JSON, not a list of messages, no messages, or a part that is not text.
    """
    messages = _parse(messages_json, param="messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [
        _normalise(message, index=index, keep_parts=keep_parts)
        for index, message in enumerate(messages)
    ]


def parse_tools(tools_json: str) -> list[JsonObject] | None:
    """Read the tools of a chat; "" and an empty list are ``None``.

    Raises:
        InvalidRequest: Not a JSON list of objects.
    """
    tools = _parse(tools_json, param="tools") if tools_json else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools must be a list of objects", param="tools")
    return tools or None


def parse_template_kwargs(kwargs_json: str) -> JsonObject:
    """Read further variables of the template; "" is none.

    Raises:
        InvalidRequest: Not a JSON object, or it names a variable that is not the client's to set.
    """
    kwargs = _parse(kwargs_json, param="chat_template_kwargs") if kwargs_json else {}
    if not isinstance(kwargs, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name in ("chat_template", "tokenize", "messages", "tools"):
        if name in kwargs:
            raise InvalidRequest(
                f"chat_template_kwargs must not contain {name!r}", param="chat_template_kwargs"
            )
    return kwargs


def _parse(text: str, *, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error


def _normalise(message: Any, *, index: int, keep_parts: bool) -> JsonObject:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param="messages"
        )
    # Templates crash on, or print, None; a missing key they know.
    clean = {key: value for key, value in message.items() if value is not None}
    clean["content"] = _content(message.get("content"), where=where, keep_parts=keep_parts)
    if "tool_calls" in clean:
        clean["tool_calls"] = _tool_calls(clean["tool_calls"], where=where)
    return _with_reasoning(clean)


def _content(content: Any, *, where: str, keep_parts: bool) -> str | list[JsonObject]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be text or a list of parts", param="messages")
    texts = [_part_text(part, where=where) for part in content]
    return [{"type": "text", "text": text} for text in texts] if keep_parts else "\n".join(texts)


def _part_text(part: Any, *, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where}.content has a part that is not an object", param="messages")
    kind = part.get("type")
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise InvalidRequest(
            f"{where}.content: parts of type {kind!r} are not supported by this model, only text",
            param="messages",
        )
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.content has a text part without text", param="messages")
    return text


def _tool_calls(calls: Any, *, where: str) -> list[JsonObject]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f"{where}.tool_calls must be a list of objects", param="messages")
    return [_tool_call(call, where=where) for call in calls]


def _tool_call(call: JsonObject, *, where: str) -> JsonObject:
    """Arguments come as JSON text, and templates want the object."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
            json.dumps(arguments, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"{where}.tool_calls: arguments are not JSON: {error}", param="messages"
            ) from error
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _with_reasoning(message: JsonObject) -> JsonObject:
    """Templates read a message's reasoning under different names; it is given under each."""
    reasoning = _first(message, _REASONING_FIELDS)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _first(message: JsonObject, names: Sequence[str]) -> Any:
    return next((message[name] for name in names if name in message), None)
