"""What replies look like, for the documentation; replies themselves are written as plain JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class AnthropicErrorObject(BaseModel):
    """What went wrong."""

    type: str = Field(examples=["invalid_request_error"])
    message: str = Field(description="What is wrong, with the field at fault.")


class AnthropicErrorReply(BaseModel):
    """Every error of the routes below /v1/messages looks like this."""

    type: Literal["error"]
    error: AnthropicErrorObject


class ContentBlock(BaseModel):
    """A piece of the answer."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = Field(None, description="Of a text block.")
    thinking: str | None = Field(None, description="Of a thinking block.")
    signature: str | None = Field(None, description="Of a thinking block: nothing is signed.")
    id: str | None = Field(None, description="Of a tool_use block.")
    name: str | None = Field(None, description="Of a tool_use block.")
    input: dict[str, Any] | None = Field(
        None, description="Of a tool_use block; that of one that was cut short is empty."
    )


class OutputTokensDetails(BaseModel):
    """Parts of output_tokens."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Token counts; the whole prompt is input_tokens and cache_read_input_tokens together."""

    input_tokens: int = Field(description="Of the prompt, but for those found in the prefix cache.")
    cache_creation_input_tokens: int = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(description="Of the prompt: found in the prefix cache.")
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageReplyObject(BaseModel):
    """Reply of POST /v1/messages."""

    id: str = Field(examples=["msg_0123456789abcdef01234567"])
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = Field(
        description="null only in message_start."
    )
    stop_sequence: str | None = Field(description="The text that ended it, if one did.")
    usage: MessageUsage


class MessageEvent(BaseModel):
    """Data of an event of a streamed message."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessageReplyObject | None = Field(None, description="Of message_start.")
    index: int | None = Field(None, description="Of content_block_*: which block.")
    content_block: ContentBlock | None = Field(None, description="Of content_block_start.")
    delta: dict[str, Any] | None = Field(
        None,
        description=(
            "Of content_block_delta: a text_delta, thinking_delta or input_json_delta; of "
            "message_delta: stop_reason and stop_sequence."
        ),
    )
    usage: MessageUsage | None = Field(None, description="Of message_delta.")
    error: AnthropicErrorObject | None = Field(None, description="Of error, which is the last.")


class TokenCount(BaseModel):
    """Reply of POST /v1/messages/count_tokens."""

    input_tokens: int
