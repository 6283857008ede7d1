"""What the events of streamed replies look like, for the documentation."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from services.gateway.openai.replies import ChatLogprobs, CompletionLogprobsObject, UsageObject


class FunctionDelta(BaseModel):
    """Part of a call's function."""

    name: str | None = Field(None, description="Only in the first part.")
    arguments: str = Field(description="The next piece of the JSON text.")


class ToolCallDelta(BaseModel):
    """Part of a tool call; the pieces of one index, joined, are the call."""

    index: int
    id: str | None = Field(None, description="Only in the first part.")
    type: Literal["function"] | None = Field(None, description="Only in the first part.")
    function: FunctionDelta


class ChatDelta(BaseModel):
    """What a choice has gained; the first chunk of a choice has its role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = Field(None, description="What is thought before the answer.")
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """One choice of a chat's chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"] | None = Field(
        description="Set on the last chunk of a choice."
    )
    stop_reason: str | int | None = Field(None, description="The stop text or token id, if any.")
    token_ids: list[int] | None = Field(None, description="Only with return_token_ids.")


class ChatCompletionChunk(BaseModel):
    """Data of an event of a streamed POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(description="One; none in the chunk that tells usage.")
    usage: UsageObject | None = Field(None, description="Only with stream_options.")
    prompt_token_ids: list[int] | None = Field(
        None, description="Only with return_token_ids, on a choice's first chunk."
    )


class CompletionChunkChoice(BaseModel):
    """One choice of a completion's chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: Literal["stop", "length"] | None = Field(
        description="Set on the last chunk of a choice."
    )
    stop_reason: str | int | None = None
    token_ids: list[int] | None = Field(None, description="Only with return_token_ids.")


class CompletionChunk(BaseModel):
    """Data of an event of a streamed POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice] = Field(
        description="One; none in the chunk that tells usage."
    )
    usage: UsageObject | None = Field(None, description="Only with stream_options.")
