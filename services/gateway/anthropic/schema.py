"""What requests may say: Anthropic's fields and a few extensions of vLLM, with strict types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from services.gateway.openai.schema import (
    FIRST_ERROR,
    MAX_MESSAGES,
    MAX_TOOLS,
    Integer,
    StrictModel,
    WithoutEffect,
)

CacheControl = Annotated[
    dict[str, Any] | None,
    Field(description="Accepted without effect: the cache finds shared prefixes by itself."),
]


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None


class ThinkingBlock(StrictModel):
    """What an earlier answer thought before it spoke; given to the chat template."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Accepted; thoughts are not signed here.")


class ToolUseBlock(StrictModel):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None


class ToolResultBlock(StrictModel):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(description="Of a tool_use block before it.")
    content: str | Annotated[list[TextBlock], FIRST_ERROR] | None = None
    is_error: bool | None = Field(
        None, description="Accepted; chat templates do not tell failures from results."
    )
    cache_control: CacheControl = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class TurnMessage(StrictModel):
    """One message of the conversation; those of one role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FIRST_ERROR] = Field(
        description="Text, or a list of blocks."
    )


class ClientTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(description="Its name.", min_length=1)
    description: str | None = Field(None, description="What it does, for the model.")
    input_schema: dict[str, Any] = Field(description="JSON schema of its input.")
    strict: bool | None = Field(
        None,
        description="Accepted; the input of enforced calls fits the schema whether true or not.",
    )
    cache_control: CacheControl = None


class ToolChoice(StrictModel):
    """Whether tools are used."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="any and tool are enforced; auto needs a model whose calls can be read."
    )
    name: str | None = Field(None, description="Of the tool; with type tool.")
    disable_parallel_tool_use: bool | None = Field(
        None,
        description="Whether at most one tool is used; default false, but true with any and tool.",
    )


class Thinking(StrictModel):
    """Whether the model thinks first; not given = as the model does by default."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="enabled and disabled set enable_thinking of the chat template."
    )
    budget_tokens: WithoutEffect | None = Field(
        None, description="Accepted without effect: thoughts count towards max_tokens only."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thoughts are left out; else they come whole."
    )


class JsonFormat(StrictModel):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="The schema; it is enforced.")


class OutputConfig(StrictModel):
    """How the answer shall be."""

    effort: str | None = Field(
        None, description="Given to the chat template as reasoning_effort, if it knows it."
    )
    format: JsonFormat | None = Field(None, description="The form of the answer.")


class ConversationBody(StrictModel):
    """Fields that POST /v1/messages and its count_tokens share."""

    model: str | None = Field(
        None, description="Served name of the model; not given = the one that is served."
    )
    messages: Annotated[list[TurnMessage], FIRST_ERROR] = Field(
        description="The conversation. If it ends with the assistant's turn, that is continued.",
        min_length=1,
        max_length=MAX_MESSAGES,
    )
    system: str | Annotated[list[TextBlock], FIRST_ERROR] | None = Field(
        None, description="What stands before the conversation."
    )
    tools: Annotated[list[ClientTool], FIRST_ERROR] | None = Field(
        None, description="Tools that the model may use.", max_length=MAX_TOOLS
    )
    tool_choice: ToolChoice | None = Field(None, description="Whether it uses them.")
    thinking: Thinking | None = Field(None, description="Whether it thinks first.")
    output_config: OutputConfig | None = Field(None, description="How the answer shall be.")
    cache_control: CacheControl = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template."
    )


_QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
_EXAMPLE: JsonDict = {"model": "smollm2", "max_tokens": 32, "messages": _QUESTION}


class MessagesRequest(ConversationBody):
    """Body of POST /v1/messages."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, json_schema_extra={"examples": [_EXAMPLE]}
    )

    max_tokens: Integer = Field(
        description="Most tokens to generate, thoughts included.", json_schema_extra={"minimum": 1}
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stop_sequences: Annotated[list[str], FIRST_ERROR] | None = Field(
        None,
        description="Texts that end the answer; they are not part of it.",
        json_schema_extra={"maxItems": 128},
    )
    temperature: float | None = Field(
        None, description="0 = greedy; default 1.", json_schema_extra={"minimum": 0, "maximum": 100}
    )
    top_p: float | None = Field(
        None,
        description="Draw from the likeliest tokens that make up this probability; default 1.",
        json_schema_extra={"exclusiveMinimum": 0, "maximum": 1},
    )
    top_k: Integer | None = Field(
        None,
        description="Draw from that many likeliest tokens; 0 or -1 = off.",
        json_schema_extra={"minimum": -1},
    )
    seed: Integer | None = Field(
        None,
        description="64-bit integer; the same seed gives the same answer. Drawn if not given.",
        json_schema_extra={"minimum": -9223372036854775808, "maximum": 9223372036854775807},
    )
    priority: Integer | None = Field(
        None,
        description="Lower runs first; default 0.",
        json_schema_extra={"minimum": -2147483648, "maximum": 2147483647},
    )
    cache_salt: str | None = Field(
        None,
        description="Only requests with the same salt share cached prompts.",
        json_schema_extra={"minLength": 1},
    )
    metadata: dict[str, Any] | None = Field(None, description="Accepted without effect.")
    service_tier: str | None = Field(None, description="Accepted without effect: one tier.")


class CountTokensRequest(ConversationBody):
    """Body of POST /v1/messages/count_tokens."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        frozen=True,
        json_schema_extra={"examples": [{"model": "smollm2", "messages": _QUESTION}]},
    )
