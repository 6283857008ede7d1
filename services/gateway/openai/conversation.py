"""What every API that holds conversations does for one: its generation, and how answers are read.

Other APIs than chat bring their requests into the shape of a chat's body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.common.errors import InvalidRequest
from services.common.sampling import SamplingParams, draw_seed
from services.gateway.answer import AnswerParser
from services.gateway.fleet import TokenizerInfo
from services.gateway.generation import ChatPrompt, GenerationRequest
from services.gateway.openai.messages import chat_prompt
from services.gateway.openai.plan import (
    INT32_LIMIT,
    Caller,
    PlanContext,
    generation_request,
    spellings,
)
from services.gateway.openai.sampling import check_num_logprobs, sampling_params
from services.gateway.openai.schema import ChatCompletionRequest
from services.gateway.openai.thoughts import ThoughtUse, thought_use
from services.gateway.openai.tools import ToolUse, tool_use


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked chat.

    Attributes:
        request: What is to be generated.
        tools: How calls come about; ``None`` = there are none.
        thoughts: How thoughts come about, likewise.
        num_top: Alternatives per token; ``None`` = no log-probabilities.
        spellings: See ``Plan``.
    """

    request: GenerationRequest
    tools: ToolUse | None
    thoughts: ThoughtUse | None
    num_top: int | None
    spellings: Mapping[str, str] = field(default_factory=dict)

    def parser(self) -> AnswerParser:
        """One for the text of one choice."""
        return AnswerParser(
            self.thoughts.parser() if self.thoughts is not None else None,
            self.tools.parser() if self.tools is not None else None,
        )


def conversation(
    body: ChatCompletionRequest,
    raw: dict[str, Any],
    *,
    request_id: str,
    info: TokenizerInfo,
    caller: Caller,
    context: PlanContext,
) -> Conversation:
    """Check what a chat asks for.

    Args:
        body: Types checked.
        raw: The same as it came.
        request_id: Unique.
        info: The model that is meant.
        caller: Who asks.
        context: What planning knows.

    Raises:
        InvalidRequest: Names the field at fault.
    """
    tools = tool_use(body, context.parsers.call_format(info.model))
    thoughts = thought_use(body, context.parsers.thought_format(info.model))
    num_top = _num_top(body)
    request = generation_request(
        body,
        _prompt(body, raw, context),
        request_id=request_id,
        model=info.model,
        sampling=_sampling(body, num_top, info.vocab_size),
        caller=caller,
        context=context,
    )
    request = _shaped(request, tools, thoughts)
    return Conversation(request, tools, thoughts, num_top, _spellings(body, tools))


def _shaped(
    request: GenerationRequest, tools: ToolUse | None, thoughts: ThoughtUse | None
) -> GenerationRequest:
    """What tool calls and thoughts ask of the text."""
    constraint = request.constraint
    if tools is not None:
        constraint = tools.beside(constraint)
    if thoughts is not None:
        constraint = thoughts.before(constraint)
    marks = tools is not None and tools.has_special_tokens
    return replace(
        request,
        constraint=constraint,
        skip_special_tokens=request.skip_special_tokens and not marks,
    )


def _sampling(body: ChatCompletionRequest, num_top: int | None, vocab_size: int) -> SamplingParams:
    check_num_logprobs("prompt_logprobs", body.prompt_logprobs)
    return sampling_params(
        body,
        max_tokens=_max_tokens(body),
        logprobs=num_top,
        prompt_logprobs=body.prompt_logprobs,
        drawn_seed=draw_seed(),
        vocab_size=vocab_size,
    )


def _prompt(body: ChatCompletionRequest, raw: dict[str, Any], context: PlanContext) -> ChatPrompt:
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest('modalities: only ["text"] is supported', param="modalities")
    return chat_prompt(body, raw, trusts_templates=context.limits.trust_request_chat_template)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    wanted = body.max_completion_tokens
    if wanted is None:
        return body.max_tokens
    if not 1 <= wanted < INT32_LIMIT:
        raise InvalidRequest(
            f"max_completion_tokens must be in [1, {INT32_LIMIT - 1}], got {wanted}",
            param="max_completion_tokens",
        )
    return wanted


def _spellings(body: ChatCompletionRequest, tools: ToolUse | None) -> dict[str, str]:
    is_new = body.max_completion_tokens is not None
    found = spellings(body, max_tokens="max_completion_tokens" if is_new else "max_tokens")
    is_of_tools = tools is not None and tools.constraint is not None
    return found | {"constraint": "tools"} if is_of_tools else found


def _num_top(body: ChatCompletionRequest) -> int | None:
    check_num_logprobs("top_logprobs", body.top_logprobs)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
