"""What replies look like, for the documentation; replies themselves are written as plain JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from services.gateway.openai.schema import ToolCall


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str = Field(description="What is wrong and how to mend it.")
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(description="The request field at fault.", examples=["temperature"])
    code: str | int | None = Field(examples=["model_not_found"])


class ErrorReply(BaseModel):
    """Every error looks like this."""

    error: ErrorObject


class PromptTokensDetails(BaseModel):
    """Parts of prompt_tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class CompletionTokensDetails(BaseModel):
    """Parts of completion_tokens."""

    reasoning_tokens: int = Field(description="Spent on thoughts.")


class UsageObject(BaseModel):
    """Token counts over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(BaseModel):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobObject(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat choice."""

    content: list[TokenLogprobObject]
    refusal: list[TokenLogprobObject] | None = None


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning: str | None = Field(None, description="What was thought before, if it is known.")
    tool_calls: list[ToolCall] | None = Field(None, description="Calls to be made, if any.")


class ChatChoice(BaseModel):
    """One choice of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]
    stop_reason: str | int | None = Field(None, description="The stop text or token id, if any.")
    token_ids: list[int] | None = Field(None, description="Only with return_token_ids.")


class PromptLogprob(BaseModel):
    """A token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatCompletion(BaseModel):
    """Reply of POST /v1/chat/completions."""

    id: str = Field(examples=["chatcmpl-0123456789abcdef01234567"])
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: list[int] | None = Field(None, description="Only with return_token_ids.")
    prompt_logprobs: PromptLogprobs | None = Field(
        None, description="Only if asked for: by token id, null for the first token."
    )


class CompletionLogprobsObject(BaseModel):
    """Log-probabilities of a completion, as columns."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One choice of a completion."""

    index: int = Field(description="prompt index * n + choice")
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = Field(None, description="Only with return_token_ids.")
    prompt_token_ids: list[int] | None = Field(None, description="Only with return_token_ids.")
    prompt_logprobs: PromptLogprobs | None = Field(
        None, description="Only if asked for: by token id, null for the first token."
    )


class Completion(BaseModel):
    """Reply of POST /v1/completions."""

    id: str = Field(examples=["cmpl-0123456789abcdef01234567"])
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject


class ModelObject(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None = Field(description="Longest context in tokens, once it is known.")


class ModelList(BaseModel):
    """Reply of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelObject]


class HealthReply(BaseModel):
    """Reply of GET /health when requests would succeed."""

    status: Literal["ok"]


class NotReadyReply(ErrorReply):
    """Reply of GET /health while they would not."""

    status: Literal["not_ready"]
    phase: str = Field(description="What is being waited for.", examples=["load weights"])
    percent: int | None = Field(description="0..100 of that phase, where it is known.")


class LiveReply(BaseModel):
    """Reply of GET /live."""

    status: Literal["alive"]


class LoadReply(BaseModel):
    """Reply of GET /load."""

    server_load: int = Field(description="Requests that are being served.")


class CacheResetReply(BaseModel):
    """Reply of POST /reset_prefix_cache."""

    engines_reset: int
    engines_busy: int = Field(description="Engines left alone, because requests hold blocks there.")


class VersionReply(BaseModel):
    """Reply of GET /version."""

    version: str
