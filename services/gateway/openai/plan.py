"""From a request body to what is asked of the tokenizers; what chat and completions share of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.common.errors import InvalidRequest
from services.common.sampling import SamplingParams
from services.gateway.auth import cache_namespace
from services.gateway.fleet import Fleet, TokenizerInfo
from services.gateway.generation import GenerationRequest, Prompt, Trace
from services.gateway.openai.constraints import REFUSED_OPTIONS, constraint_of
from services.gateway.openai.fields import UnknownFields
from services.gateway.openai.reply import Reply, StreamUsage
from services.gateway.openai.sampling import bad_words, stop_strings
from services.gateway.openai.schema import GenerationBody
from services.gateway.parsers import Parsers

MAX_SALT_CHARS = 1024
INT32_LIMIT = 2**31
MAX_TOKENS = "max_tokens"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    Attributes:
        tenant: Label of the API key; "" = none.
        trace: The client's trace context, if it sent one.
    """

    tenant: str = ""
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what one request may ask for."""

    max_n: int
    max_choices: int
    trust_request_chat_template: bool


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What planning needs to know beside the request.

    Attributes:
        namespace_secret: Key of the cache namespaces.
        parsers: How answers of models are read.
    """

    fleet: Fleet
    limits: Limits
    unknown_fields: UnknownFields
    namespace_secret: bytes
    parsers: Parsers


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request: one generation per prompt, and the reply to make of them.

    Attributes:
        spellings: Field as the other services call it → as this request's body calls it.
    """

    requests: tuple[GenerationRequest, ...]
    reply: Reply
    is_stream: bool
    spellings: Mapping[str, str] = field(default_factory=dict)

    def in_client_words(self, error: InvalidRequest) -> InvalidRequest:
        """An error from down the line that names the field as the client spelled it."""
        return respelled(error, self.spellings)


def respelled(error: InvalidRequest, spellings: Mapping[str, str]) -> InvalidRequest:
    """An error from down the line that names the field as the client spelled it.

    Args:
        error: As it came.
        spellings: See ``Plan``.
    """
    spelling = spellings.get(error.param or "")
    if spelling is None:
        return error
    message = f"{spelling}: {error.message}"
    if error.param == MAX_TOKENS and MAX_TOKENS in error.message:  # other names are words as well
        message = error.message.replace(MAX_TOKENS, spelling)
    return type(error)(message, param=spelling, code=error.code)


def check_common(
    body: GenerationBody, context: PlanContext, *, also_refused: dict[str, tuple[object, ...]]
) -> TokenizerInfo:
    """Check the fields that chat and completions share, but for sampling.

    Returns:
        The model that is meant.

    Raises:
        InvalidRequest: Names the field.
        ModelNotFound: No such model.
    """
    info = context.fleet.resolve_model(body.model)
    context.unknown_fields.check(body.model_extra, also_refused=also_refused)
    if body.structured_outputs is not None:
        context.unknown_fields.check(
            body.structured_outputs.model_extra,
            also_refused=REFUSED_OPTIONS,
            where="structured_outputs.",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    check_queueing(body)
    return info


class QueueingBody(Protocol):
    """The fields of a body that say how its prompts are cut, shared and put in order."""

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same salt share cached prompts."""

    @property
    def priority(self) -> int | None:
        """Lower runs first."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """Tokens of a prompt that are kept."""


def check_queueing(body: QueueingBody) -> None:
    """Check the ranges of these fields.

    Raises:
        InvalidRequest: Names the field.
    """
    _check_salt(body.cache_salt)
    _check_int32("priority", body.priority)
    _check_truncation(body.truncate_prompt_tokens)


def _check_salt(salt: str | None) -> None:
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters", param="cache_salt"
        )


def _check_int32(name: str, value: int | None) -> None:
    if value is not None and not -INT32_LIMIT <= value < INT32_LIMIT:
        raise InvalidRequest(
            f"{name} must be in [{-INT32_LIMIT}, {INT32_LIMIT - 1}], got {value}", param=name
        )


def _check_truncation(value: int | None) -> None:
    if value is not None and not (value == -1 or 1 <= value < INT32_LIMIT):
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or in [1, {INT32_LIMIT - 1}], got {value}",
            param="truncate_prompt_tokens",
        )


def num_choices(body: GenerationBody, limits: Limits) -> int:
    """``n``, checked.

    Raises:
        InvalidRequest: Not in 1..max_n.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limits.max_n:
        raise InvalidRequest(f"n must be in [1, {limits.max_n}], got {n}", param="n")
    return n


def spellings(body: GenerationBody, *, max_tokens: str = MAX_TOKENS) -> dict[str, str]:
    """What a body calls the fields for which there are several names.

    Args:
        body: The request.
        max_tokens: The field that the most tokens came in.
    """
    structured = body.structured_outputs is not None
    found = {"constraint": "structured_outputs" if structured else "response_format"}
    return found if max_tokens == MAX_TOKENS else found | {MAX_TOKENS: max_tokens}


def stream_usage(body: GenerationBody) -> StreamUsage:
    """When a streamed reply tells its usage."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return StreamUsage.NEVER
    return StreamUsage.ALWAYS if options.continuous_usage_stats else StreamUsage.AT_END


def generation_request(
    body: GenerationBody,
    prompt: Prompt,
    *,
    request_id: str,
    model: str,
    sampling: SamplingParams,
    caller: Caller,
    context: PlanContext,
    add_special_tokens: bool = True,
) -> GenerationRequest:
    """One prompt's request.

    Args:
        body: The fields that chat and completions share.
        prompt: What is to be continued.
        request_id: Unique.
        model: Served name.
        sampling: Checked.
        caller: Who asks.
        context: What planning knows.
        add_special_tokens: Of a text.
    """
    return GenerationRequest(
        request_id=request_id,
        model=model,
        prompt=prompt,
        sampling=sampling,
        n=num_choices(body, context.limits),
        stop=stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        constraint=constraint_of(body.response_format, body.structured_outputs),
        priority=body.priority or 0,
        cache_namespace=cache_namespace(
            context.namespace_secret, tenant=caller.tenant, cache_salt=body.cache_salt or ""
        ),
        tenant=caller.tenant,
        bad_words=bad_words(body.bad_words),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        trace=caller.trace,
        add_special_tokens=add_special_tokens,
    )
