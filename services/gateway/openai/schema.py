"""What requests may say: OpenAI's fields and vLLM's extensions, with strict types.

Only types are checked here; ranges are checked where a field is used. ``null`` means "not given"
everywhere. Fields that are not listed land in ``model_extra``: ``fields.py`` knows what they are.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema
from pydantic.config import JsonDict

MAX_MESSAGES = 1 << 14
MAX_TOOLS = 128
INT64_LIMIT = 2**63

_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": 128},
        {"type": "null"},
    ]
}
_NAMED_FUNCTION: JsonDict = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_ALLOWED_TOOLS: JsonDict = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED_FUNCTION, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_TOOL_CHOICE_SCHEMA: JsonDict = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _NAMED_FUNCTION,
        _ALLOWED_TOOLS,
        {"type": "null"},
    ]
}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}


class _StopAtFirst(FailFast):
    """One error is enough of a long list; hashable, so that it may stand inside a union."""

    __hash__ = object.__hash__


FIRST_ERROR = _StopAtFirst()


def _as_written(value: Any) -> Any:
    """An integer of more than 64 bits, which JSON's parser gives as a float: its range is wrong,
    not its type."""
    is_large = type(value) is float and abs(value) >= INT64_LIMIT
    return int(Decimal(repr(value))) if is_large else value


AS_WRITTEN = BeforeValidator(_as_written)
Integer = Annotated[int, AS_WRITTEN]
"""Of any size: its range is checked where it is used."""
WithoutEffect = Annotated[int, Field(ge=0, le=INT64_LIMIT - 1), AS_WRITTEN]
"""An integer that is not used."""
TokenIdList = Annotated[list[Integer], FIRST_ERROR]


class StrictModel(BaseModel):
    """Types as they are written: no text for a number, no true for 1."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(StrictModel):
    """How a streamed reply is accounted for."""

    include_usage: bool | None = Field(
        None, description="Send one more chunk before [DONE], with usage and an empty choices list."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: usage so far on every chunk, over all choices."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; chunks are never padded.")


class JsonSchemaFormat(StrictModel):
    """A JSON schema for the answer."""

    name: str = Field(description="A name for the schema.")
    description: str | None = Field(None, description="Accepted; not shown to the model.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema.")
    strict: bool | None = Field(
        None, description="Accepted; the schema is enforced whether true or not."
    )


class ResponseFormat(StrictModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: no constraint; json_object: any JSON object; json_schema: that schema."
    )
    json_schema: JsonSchemaFormat | None = Field(
        None, description="The schema; required with type json_schema."
    )


class StructuredOutputs(StrictModel):
    """vLLM's constraints: exactly one of them."""

    json_: dict[str, Any] | str | None = Field(
        None, alias="json", description="A JSON schema, as an object or as text."
    )
    regex: str | None = Field(None, description="A regular expression for the whole answer.")
    choice: list[str] | None = Field(None, description="The answer is one of these.")
    grammar: str | None = Field(None, description="A context-free grammar in lark's notation.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class RepetitionDetectionOptions(StrictModel):
    """Ends a choice that repeats itself."""

    max_pattern_size: Integer = Field(description="Longest pattern in tokens.")
    min_pattern_size: Integer | None = Field(
        None, description="Shortest pattern in tokens; default 1."
    )
    min_count: Integer = Field(description="Copies of a pattern that end the choice; at least 2.")


class CommonBody(StrictModel):
    """Fields that every route that generates has."""

    model: str | None = Field(
        None, description="Served name of the model; not given = the one that is served."
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stop: Annotated[Any, WithJsonSchema(_STOP_SCHEMA)] = Field(
        None, description="Text that ends a choice; it is not part of the answer."
    )
    temperature: float | None = Field(
        None, description="0 = greedy; default 1.", json_schema_extra={"minimum": 0}
    )
    top_p: float | None = Field(
        None, description="Draw from the likeliest tokens that make up this probability; default 1."
    )
    seed: Integer | None = Field(
        None,
        description="64-bit integer; the same seed gives the same answer. Drawn if not given.",
        json_schema_extra={"minimum": -9223372036854775808, "maximum": 9223372036854775807},
    )
    presence_penalty: float | None = Field(
        None,
        description="-2..2: lowers tokens that were generated before; default 0.",
        json_schema_extra={"minimum": -2, "maximum": 2},
    )
    frequency_penalty: float | None = Field(
        None,
        description="-2..2: lowers tokens by how often they were generated; default 0.",
        json_schema_extra={"minimum": -2, "maximum": 2},
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="Token id (as text) to a bias of -100..100."
    )
    user: str | None = Field(None, description="Accepted without effect.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted without effect.")
    service_tier: str | None = Field(None, description="Accepted without effect: one tier.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted without effect: the cache finds shared prefixes by itself."
    )
    prompt_cache_options: dict[str, Any] | None = Field(
        None, description="Accepted without effect."
    )
    prompt_cache_retention: str | None = Field(None, description="Accepted without effect.")
    safety_identifier: str | None = Field(None, description="Accepted without effect.")
    top_k: Integer | None = Field(
        None,
        description="Draw from that many likeliest tokens; 0 or -1 = off.",
        json_schema_extra={"minimum": -1},
    )
    min_p: float | None = Field(
        None,
        description="0..1: drop tokens less likely than this share of the likeliest.",
        json_schema_extra={"minimum": 0, "maximum": 1},
    )
    repetition_penalty: float | None = Field(
        None, description="Above 1 lowers tokens of prompt and output; default 1."
    )
    min_tokens: Integer | None = Field(
        None,
        description="Nothing ends the choice before; default 0.",
        json_schema_extra={"minimum": 0},
    )
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-text token.")
    stop_token_ids: TokenIdList | None = Field(None, description="Tokens that end a choice.")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop text in the answer."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; default true."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="Default true; only matters with skip_special_tokens false."
    )
    truncate_prompt_tokens: Integer | None = Field(
        None,
        description="Keep only that many last tokens of the prompt; -1 = what fits.",
        json_schema_extra={"minimum": -1},
    )
    allowed_token_ids: TokenIdList | None = Field(
        None, description="Only these tokens can come out."
    )
    bad_words: Annotated[list[str], FIRST_ERROR] | None = Field(
        None, description="Words that cannot come out."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's spelling of constraints; the only one of a request."
    )
    repetition_detection: RepetitionDetectionOptions | None = Field(
        None, description="Ends a choice that repeats itself, with finish_reason stop."
    )
    priority: Integer | None = Field(
        None,
        description="Lower runs first; default 0, and nothing else under the policy fcfs.",
        json_schema_extra={"minimum": -2147483648, "maximum": 2147483647},
    )
    request_id: str | None = Field(
        None,
        description="Accepted without effect: ids are ours. X-Request-Id is echoed and logged.",
    )
    cache_salt: str | None = Field(
        None, description="Only requests with the same salt share cached prompts."
    )


class GenerationBody(CommonBody):
    """Fields that chat and completions share."""

    stream_options: StreamOptions | None = Field(None, description="Only with stream true.")
    n: Integer | None = Field(
        None,
        description="Choices per prompt; default 1.",
        json_schema_extra={"minimum": 1},
    )
    max_tokens: Integer | None = Field(
        None,
        description=(
            "Most tokens to generate; default 16 in completions, the rest of the context in chat."
        ),
        json_schema_extra={"minimum": 0},
    )
    prompt_logprobs: Integer | None = Field(
        None,
        description="Log-probabilities of the prompt, with that many alternatives; not streamed.",
        json_schema_extra={"minimum": 0, "maximum": 20},
    )
    response_format: ResponseFormat | None = Field(None, description="The form of the answer.")
    return_token_ids: bool | None = Field(
        None, description="Add token_ids to choices and prompt_token_ids to the reply."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="In logprobs, write tokens as token_id:N."
    )


class Function(StrictModel):
    """A function that the model may call."""

    name: str = Field(description="Its name.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = Field(
        None,
        description="Accepted; arguments of enforced calls fit the schema whether true or not.",
    )


class Tool(StrictModel):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function


class FunctionCall(StrictModel):
    """A call that was made earlier in the conversation."""

    name: str
    arguments: str = Field(description="JSON text.")


class ToolCall(StrictModel):
    """A tool call of an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(StrictModel):
    """A part of a message; only text (and refusals) can be read."""

    type: str = Field(
        description="text or refusal.", json_schema_extra={"enum": ["text", "refusal"]}
    )
    text: str | None = None
    refusal: str | None = None


class Message(StrictModel):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], FIRST_ERROR] | None = Field(
        None, description="Text, or a list of text parts."
    )
    name: str | None = Field(None, description="Who speaks; given to the template.")
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None


_CHAT_EXAMPLE: JsonDict = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 32,
    "temperature": 0,
}


class ChatCompletionRequest(GenerationBody):
    """Body of POST /v1/chat/completions."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, json_schema_extra={"examples": [_CHAT_EXAMPLE]}
    )

    messages: Annotated[list[Message], FIRST_ERROR] = Field(
        description="The conversation.", min_length=1, max_length=MAX_MESSAGES
    )
    max_completion_tokens: Integer | None = Field(
        None,
        description="Most tokens to generate; goes before max_tokens.",
        json_schema_extra={"minimum": 1},
    )
    logprobs: bool | None = Field(None, description="Return log-probabilities.")
    top_logprobs: Integer | None = Field(
        None,
        description="0..20 alternatives per token; needs logprobs true.",
        json_schema_extra={"minimum": 0, "maximum": 20},
    )
    prediction: dict[str, Any] | None = Field(
        None, description="Accepted without effect: a hint for speed."
    )
    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    reasoning_effort: str | None = Field(
        None, description="Given to the chat template, which may not know it."
    )
    modalities: list[str] | None = Field(None, description="Only text.")
    tools: Annotated[list[Tool], FIRST_ERROR] | None = Field(
        None, description="Functions that the model may call.", max_length=MAX_TOOLS
    )
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE_SCHEMA)] = Field(
        None,
        description=(
            "none, auto, required, one function by name, or the names of those that may be called "
            "(allowed_tools, with the mode auto or required). Required and named calls are "
            "enforced. auto needs a model whose way of writing calls is known."
        ),
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description=(
            "Whether several calls may be made; default true, but false with tool_choice required."
        ),
    )
    include_reasoning: bool | None = Field(
        None, description="Whether the thought is part of the reply; default true."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether the template opens the assistant's turn; default true."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message instead of opening a new one."
    )
    chat_template: str | None = Field(
        None, description="A template of the request's own; refused unless the server trusts it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template."
    )


_COMPLETION_EXAMPLE: JsonDict = {
    "model": "smollm2",
    "prompt": "1 2 3 4",
    "max_tokens": 10,
    "temperature": 0,
}


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        frozen=True,
        json_schema_extra={"examples": [_COMPLETION_EXAMPLE]},
    )

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of either."
    )
    echo: bool | None = Field(None, description="Put the prompt in front of the answer.")
    logprobs: Integer | None = Field(
        None,
        description="Log-probabilities with 0..20 alternatives per token.",
        json_schema_extra={"minimum": 0, "maximum": 20},
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to a text; default true."
    )
