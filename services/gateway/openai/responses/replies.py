"""What replies of /v1/responses look like, for the documentation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from services.gateway.openai.replies import TokenLogprobObject

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """Text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] = Field(description="Always empty.")
    logprobs: list[TokenLogprobObject] = Field(description="Empty unless asked for.")


class OutputMessage(BaseModel):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    """Text of a thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """What was thought before the answer."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]] = Field(description="Always empty: the thought comes whole.")
    content: list[ReasoningText]
    encrypted_content: None


class OutputCall(BaseModel):
    """A call to be made."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str = Field(description="To be named by the function_call_output.")
    name: str
    arguments: str = Field(description="JSON text.")


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseErrorObject(BaseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None
    type: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(BaseModel):
    """Parts of input_tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")
    cache_write_tokens: int = Field(description="Always 0: caching is not asked for.")


class OutputTokensDetails(BaseModel):
    """Parts of output_tokens."""

    reasoning_tokens: int = Field(description="Spent on thoughts.")


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ReasoningSettings(BaseModel):
    """How the model was to think."""

    effort: str | None
    summary: str | None


class TextSettings(BaseModel):
    """How the text was to be."""

    format: dict[str, Any]


class ResponseObject(BaseModel):
    """Reply of POST /v1/responses and GET /v1/responses/{response_id}."""

    id: str = Field(examples=["resp_0123456789abcdef01234567"])
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseErrorObject | None = Field(description="With status failed.")
    incomplete_details: IncompleteDetails | None = Field(description="With status incomplete.")
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = Field(description="Once it has ended.")
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class InputItemList(BaseModel):
    """Reply of GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]] = Field(description="Items with their ids.")
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """Reply of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(BaseModel):
    """Data of an event of a streamed response; the event is named as it is typed."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int = Field(description="0, 1, 2 ... within a stream.")
    response: ResponseObject | None = Field(
        None, description="Of the events that tell of the response as a whole."
    )
    output_index: int | None = Field(None, description="Place of the item in output.")
    item: OutputItem | None = Field(None, description="Of output_item.added and .done.")
    item_id: str | None = Field(None, description="Of the events inside an item.")
    content_index: int | None = Field(None, description="Always 0.")
    part: OutputText | ReasoningText | None = Field(
        None, description="Of content_part.added and .done."
    )
    delta: str | None = Field(None, description="The next piece.")
    text: str | None = Field(None, description="All of the text.")
    arguments: str | None = Field(None, description="All of the arguments.")
    logprobs: list[TokenLogprobObject] | None = Field(
        None, description="Of the tokens of the piece, or of all; empty unless asked for."
    )
    code: str | None = Field(None, description="Of error.")
    message: str | None = Field(None, description="Of error.")
    param: str | None = Field(None, description="Of error.")
