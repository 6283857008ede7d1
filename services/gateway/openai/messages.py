"""Checks the messages of a chat, and gives them on as they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from services.common.errors import InvalidRequest
from services.gateway.generation import ChatPrompt
from services.gateway.openai.schema import ContentPart, Message, Tool

MAX_PARTS = 1024

# Fields of OpenAI's messages that would be lost on a text model, and what to use instead.
_REFUSED = {"audio": "this model reads text only", "function_call": "use tool_calls"}

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


class ChatBody(Protocol):
    """The fields of a body that make a chat prompt."""

    @property
    def messages(self) -> Sequence[Message] | None:
        """The conversation."""

    @property
    def tools(self) -> Sequence[Tool] | None:
        """Functions that the template is told of."""

    @property
    def reasoning_effort(self) -> str | None:
        """A variable of the template."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the assistant's turn is opened."""

    @property
    def continue_final_message(self) -> bool | None:
        """Whether the last message is left open."""

    @property
    def chat_template(self) -> str | None:
        """A template of the request's own."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Variables of the template."""


def chat_prompt(body: ChatBody, raw: dict[str, Any], *, trusts_templates: bool) -> ChatPrompt:
    """Check a conversation and give it on.

    Args:
        body: Types checked.
        raw: The same as it came: messages and tools are passed on untouched.
        trusts_templates: Whether a request may bring a template.

    Raises:
        InvalidRequest: Names the field.
    """
    check_messages(body.messages or ())
    if body.chat_template is not None and not trusts_templates:
        raise InvalidRequest(
            "chat_template of a request is not trusted by this server "
            "(--trust-request-chat-template)",
            param="chat_template",
        )
    return ChatPrompt(
        messages_json=orjson.dumps(raw["messages"]).decode(),
        tools_json=orjson.dumps(raw["tools"]).decode() if body.tools else "",
        template_kwargs_json=_template_kwargs(body),
        add_generation_prompt=_opens_assistant_turn(body),
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template or "",
    )


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse messages that say nothing, or what a text model cannot read.

    Raises:
        InvalidRequest: Names the message.
    """
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_extra(message, where)
        if message.content is None:
            _check_silence(message, where)
        elif isinstance(message.content, list):
            _check_parts(message.content, f"{where}.content")


def _check_extra(message: Message, where: str) -> None:
    for name, reason in _REFUSED.items():
        if (message.model_extra or {}).get(name) is not None:
            field = f"{where}.{name}"
            raise InvalidRequest(f"{field} is not supported here: {reason}", param=field)


def _check_silence(message: Message, where: str) -> None:
    """Only an assistant may say nothing: it may have called tools, or refused."""
    if message.role not in ("assistant", "function"):
        raise InvalidRequest(
            f"{where}.content is required for role {message.role}", param=f"{where}.content"
        )


def _check_parts(parts: Sequence[ContentPart], where: str) -> None:
    if not parts:
        raise InvalidRequest(f"{where} must not be an empty list", param=where)
    if len(parts) > MAX_PARTS:
        raise InvalidRequest(f"{where} has {len(parts)} parts; at most {MAX_PARTS}", param=where)
    for index, part in enumerate(parts):
        field = f"{where}[{index}]"
        if part.type not in ("text", "refusal"):
            raise InvalidRequest(
                f"{field}: this model reads text only, got a part of type {part.type[:40]!r}",
                param=field,
            )
        if (part.text if part.type == "text" else part.refusal) is None:
            raise InvalidRequest(f"{field}.{part.type} is required", param=f"{field}.{part.type}")


def _template_kwargs(body: ChatBody) -> str:
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


def _opens_assistant_turn(body: ChatBody) -> bool:
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
