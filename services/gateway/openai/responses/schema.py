"""What POST /v1/responses may say: OpenAI's fields, and vLLM's that every generating route has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, WithJsonSchema
from pydantic.config import JsonDict

from services.gateway.openai.schema import (
    FIRST_ERROR,
    MAX_MESSAGES,
    MAX_TOOLS,
    CommonBody,
    Integer,
    StrictModel,
    WithoutEffect,
)

MESSAGE = "message"

_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": {"type": "object"}},
            },
            "required": ["type", "mode", "tools"],
        },
        {"type": "null"},
    ]
}


class InputPart(StrictModel):
    """A part of a message; only text (and refusals) can be read."""

    type: str = Field(description="input_text, output_text or refusal.")
    text: str | None = None
    refusal: str | None = None


PartList = Annotated[list[InputPart], FIRST_ERROR]


class MessageItem(StrictModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | PartList = Field(description="Text, or a list of text parts.")
    status: str | None = None


class CallItem(StrictModel):
    """A call that the model has made."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str = Field(description="JSON text.")
    status: str | None = None


class CallOutputItem(StrictModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str = Field(description="Of a function_call before it.")
    output: str | PartList
    status: str | None = None


class ReasoningPart(StrictModel):
    """A part of a thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictModel):
    """What the model has thought before an answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, Any]] | None = None
    content: Annotated[list[ReasoningPart], FIRST_ERROR] | None = None
    encrypted_content: str | None = Field(None, description="Not read: thoughts come in clear.")
    status: str | None = None


class ItemReference(StrictModel):
    """An item of a response that is stored."""

    type: Literal["item_reference"] | None = None
    id: str


def item_type(item: Any) -> str | None:
    """The type of an input item; messages and references need not say that they are."""
    if isinstance(item, dict):
        kind = item.get("type")
        is_reference = kind is None and item.keys() <= {"id", "type"} and "id" in item
        return "item_reference" if is_reference else MESSAGE if kind is None else str(kind)
    return getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(item_type),
]
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(description="Its name.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = Field(
        None,
        description="Accepted; arguments of enforced calls fit the schema whether true or not.",
    )


class TextFormat(StrictModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: no constraint; json_object: any JSON object; json_schema: that schema."
    )
    name: str | None = Field(None, description="A name for the schema.")
    description: str | None = Field(None, description="Accepted; not shown to the model.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="The JSON schema; required with type json_schema."
    )
    strict: bool | None = Field(
        None, description="Accepted; the schema is enforced whether true or not."
    )


class TextOptions(StrictModel):
    """How the text of the answer is to be."""

    format: TextFormat | None = Field(None, description="The form of the answer.")


class ReasoningOptions(StrictModel):
    """How the model is to think."""

    effort: str | None = Field(
        None, description="Given to the chat template, which may not know it."
    )


class ResponseStreamOptions(StrictModel):
    """How a streamed reply is sent."""

    include_obfuscation: bool | None = Field(None, description="Accepted; events are never padded.")


_EXAMPLE: JsonDict = {
    "model": "smollm2",
    "instructions": "Answer in one sentence.",
    "input": "What is the capital of France?",
    "max_output_tokens": 32,
    "temperature": 0,
}


class ResponseRequest(CommonBody):
    """Body of POST /v1/responses."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, json_schema_extra={"examples": [_EXAMPLE]}
    )

    input: str | Annotated[list[InputItem], FIRST_ERROR, Field(max_length=MAX_MESSAGES)] = Field(
        description="What the user says, or a list of items."
    )
    instructions: str | None = Field(
        None,
        description="A system message in front of the conversation, for this response only.",
    )
    previous_response_id: str | None = Field(
        None, description="A stored response whose conversation goes on; without its instructions."
    )
    max_output_tokens: Integer | None = Field(
        None, description="Most tokens to generate, thoughts included; default: what fits."
    )
    tools: Annotated[list[FunctionTool], FIRST_ERROR] | None = Field(
        None, description="Functions that the model may call.", max_length=MAX_TOOLS
    )
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE_SCHEMA)] = Field(
        None,
        description=(
            "none, auto, required, one function by name, or allowed_tools; auto needs a model "
            "whose way of writing calls is known."
        ),
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description=(
            "Whether several calls may be made; default true, but false with tool_choice required."
        ),
    )
    text: TextOptions | None = Field(None, description="How the text of the answer is to be.")
    reasoning: ReasoningOptions | None = Field(None, description="How the model is to think.")
    include: Annotated[list[str], FIRST_ERROR] | None = Field(
        None,
        description=(
            "message.output_text.logprobs: log-probabilities. OpenAI's other values are taken: "
            "thoughts come in clear, and what hosted tools would add is never there."
        ),
    )
    top_logprobs: Integer | None = Field(
        None, description="0..20 alternatives per token; log-probabilities are returned if not 0."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description=(
            "disabled (default): a conversation that does not fit is a 400; auto: its oldest "
            "turns are left out, but for system and developer messages."
        ),
    )
    store: bool | None = Field(
        None, description="Whether the response can be retrieved and continued; default true."
    )
    background: bool | None = Field(
        None, description="Answer at once and go on; the response is then retrieved."
    )
    stream_options: ResponseStreamOptions | None = Field(
        None, description="Accepted; events are never padded."
    )
    max_tool_calls: WithoutEffect | None = Field(
        None, description="Accepted without effect: it bounds calls of hosted tools."
    )
    metadata: dict[str, Any] | None = Field(
        None, description="Accepted: up to 16 texts, returned with the response."
    )
    user: str | None = Field(None, description="Accepted: returned with the response.")
    safety_identifier: str | None = Field(None, description="Accepted: returned with the response.")
    prompt_cache_key: str | None = Field(
        None,
        description="Accepted: returned; the cache finds shared prefixes by itself.",
    )
    include_reasoning: bool | None = Field(
        None, description="Whether the thought is part of the reply; default true."
    )
    chat_template: str | None = Field(
        None, description="A template of the request's own; refused unless the server trusts it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template."
    )
