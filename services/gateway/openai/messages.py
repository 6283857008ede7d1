"""Checks the messages of a chat, and gives them on as they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.gateway.openai.schema import ChatCompletionRequest, ContentPart, Message

# What chat_template_kwargs may not set: each has a field of its own, or would be code.
_RESERVED_KWARGS = frozenset(
    {
        "chat_template",
        "messages",
        "conversation",
        "tools",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_dict",
    }
)


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse messages that say nothing, or what a text model cannot read.

    Raises:
        InvalidRequest: Names the message.
    """
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.content is None:
            _check_silence(message, where)
        elif isinstance(message.content, list):
            _check_parts(message.content, f"{where}.content")


def _check_silence(message: Message, where: str) -> None:
    """Only an assistant may say nothing: it may have called tools, or refused."""
    if message.role not in ("assistant", "function"):
        raise InvalidRequest(
            f"{where}.content is required for role {message.role}", param=f"{where}.content"
        )


def _check_parts(parts: Sequence[ContentPart], where: str) -> None:
    if not parts:
        raise InvalidRequest(f"{where} must not be an empty list", param=where)
    for index, part in enumerate(parts):
        field = f"{where}[{index}]"
        if part.type not in ("text", "refusal"):
            raise InvalidRequest(
                f"{field}: this model reads text only, got a part of type {part.type[:40]!r}",
                param=field,
            )
        if (part.text if part.type == "text" else part.refusal) is None:
            raise InvalidRequest(f"{field}.{part.type} is required", param=f"{field}.{part.type}")


def template_kwargs(body: ChatCompletionRequest) -> str:
    """Variables for the chat template as JSON; "" = none.

    Raises:
        InvalidRequest: One of them is not the client's to set.
    """
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs must not set {reserved[0]}", param="chat_template_kwargs"
        )
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return orjson.dumps(kwargs).decode() if kwargs else ""


def opens_assistant_turn(body: ChatCompletionRequest) -> bool:
    """Whether the template ends with the head of the assistant's answer.

    Raises:
        InvalidRequest: The last message is to be continued as well.
    """
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt: false",
            param="continue_final_message",
        )
    return False
