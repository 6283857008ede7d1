"""POST /tokenize and /detokenize: text or a chat to token ids, and back (vLLM's shapes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from services.common.errors import InvalidRequest
from services.gateway.generation import ChatPrompt, IdsPrompt, TextPrompt
from services.gateway.openai.messages import chat_prompt
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import PlanContext
from services.gateway.openai.prompts import token_ids
from services.gateway.openai.schema import (
    FIRST_ERROR,
    MAX_MESSAGES,
    MAX_TOOLS,
    Message,
    StrictModel,
    Tool,
)

_EXAMPLE: JsonDict = {"model": "smollm2", "prompt": "1 2 3 4"}


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize: a prompt, or messages."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, json_schema_extra={"examples": [_EXAMPLE]}
    )

    model: str | None = Field(None, description="Served name of the model.")
    prompt: str | None = Field(None, description="Text to be encoded.")
    messages: Annotated[list[Message], FIRST_ERROR] | None = Field(
        None,
        description="A conversation, rendered by the chat template first.",
        min_length=1,
        max_length=MAX_MESSAGES,
    )
    tools: Annotated[list[Tool], FIRST_ERROR] | None = Field(
        None, description="Functions that the template is told of.", max_length=MAX_TOOLS
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to a prompt; default true."
    )
    return_token_strs: bool | None = Field(None, description="Return the text of each token too.")
    reasoning_effort: str | None = Field(None, description="As in chat.")
    add_generation_prompt: bool | None = Field(None, description="As in chat; default true.")
    continue_final_message: bool | None = Field(None, description="As in chat.")
    chat_template: str | None = Field(None, description="As in chat.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As in chat.")


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        frozen=True,
        json_schema_extra={"examples": [{"model": "smollm2", "tokens": [33, 216, 34]}]},
    )

    model: str | None = Field(None, description="Served name of the model.")
    tokens: Annotated[list[int], FIRST_ERROR] = Field(description="Token ids.")


class TokenizeReply(BaseModel):
    """Reply of POST /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    """Reply of POST /detokenize."""

    prompt: str


@dataclass(frozen=True, slots=True)
class TokenizePlan:
    """What is to be encoded, and what is to be shown.

    Attributes:
        add_special_tokens: Of a text; a rendered chat has its own.
    """

    model: str
    max_model_len: int
    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool
    returns_strings: bool

    def reply(self, ids: list[int], strings: list[str] | None) -> dict[str, Any]:
        """The reply."""
        return {
            "count": len(ids),
            "max_model_len": self.max_model_len or None,
            "tokens": ids,
            "token_strs": strings,
        }


def plan_tokenize(raw: dict[str, Any], context: PlanContext) -> TokenizePlan:
    """Check a body of /tokenize.

    Raises:
        InvalidRequest: Names the field.
        ModelNotFound: No such model.
    """
    body = validate(raw, TokenizeRequest)
    info = context.fleet.resolve_model(body.model)
    context.unknown_fields.check(body.model_extra, also_refused={})
    return TokenizePlan(
        model=info.model,
        max_model_len=info.max_model_len,
        prompt=_prompt(body, raw, context),
        add_special_tokens=body.add_special_tokens is not False,
        returns_strings=bool(body.return_token_strs),
    )


def _prompt(
    body: TokenizeRequest, raw: dict[str, Any], context: PlanContext
) -> TextPrompt | ChatPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return TextPrompt(body.prompt)
    if body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens: a rendered chat has its special tokens already",
            param="add_special_tokens",
        )
    return chat_prompt(body, raw, trusts_templates=context.limits.trust_request_chat_template)


def plan_detokenize(raw: dict[str, Any], context: PlanContext) -> tuple[str, IdsPrompt]:
    """Check a body of /detokenize.

    Returns:
        The model, and the ids.

    Raises:
        InvalidRequest: Names the field.
        ModelNotFound: No such model.
    """
    body = validate(raw, DetokenizeRequest)
    info = context.fleet.resolve_model(body.model)
    context.unknown_fields.check(body.model_extra, also_refused={})
    ids = token_ids(body.tokens, "tokens", vocab_size=info.vocab_size)
    return info.model, ids
