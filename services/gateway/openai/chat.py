"""POST /v1/chat/completions: the plan of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.common.errors import InvalidRequest
from services.common.sampling import SamplingParams
from services.gateway.answer import AnswerParser
from services.gateway.generation import ChatPrompt, GenerationRequest
from services.gateway.openai.chat_reply import ChatOptions, ChatReply
from services.gateway.openai.messages import chat_prompt
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import (
    INT32_LIMIT,
    Caller,
    Plan,
    PlanContext,
    check_common,
    draw_seed,
    generation_request,
    spellings,
    stream_usage,
)
from services.gateway.openai.reply import ReplyHead
from services.gateway.openai.sampling import check_num_logprobs, sampling_params
from services.gateway.openai.schema import ChatCompletionRequest
from services.gateway.openai.thoughts import ThoughtUse, thought_use
from services.gateway.openai.tools import ToolUse, tool_use
from services.gateway.request_id import new_request_id

_REFUSED: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
}


def plan_chat(raw: dict[str, Any], caller: Caller, context: PlanContext, *, now: int) -> Plan:
    """Check a chat request and say what is to be done for it.

    Args:
        raw: The parsed body.
        caller: Who sends it.
        context: What planning knows.
        now: Unix seconds.

    Raises:
        InvalidRequest: Names the field at fault.
        ModelNotFound: No such model.
    """
    body = validate(raw, ChatCompletionRequest)
    info = check_common(body, context, also_refused=_REFUSED)
    tools = tool_use(body, context.parsers.call_format(info.model))
    thoughts = thought_use(body, context.parsers.thought_format(info.model))
    request = generation_request(
        body,
        _prompt(body, raw, context),
        request_id=new_request_id("chatcmpl"),
        model=info.model,
        sampling=_sampling(body, info.vocab_size),
        caller=caller,
        context=context,
    )
    request = _shaped(request, tools, thoughts)
    head = ReplyHead(request.request_id, now, info.model)
    reply = ChatReply(head, _options(body, tools, thoughts, n=request.n))
    return Plan((request,), reply, bool(body.stream), _spellings(body, tools))


def _shaped(
    request: GenerationRequest, tools: ToolUse | None, thoughts: ThoughtUse | None
) -> GenerationRequest:
    """What tool calls and thoughts ask of the text."""
    constraint = request.constraint
    if tools is not None and tools.constraint is not None:
        constraint = tools.constraint  # there is no content that another one could be about
    if thoughts is not None:
        constraint = thoughts.before(constraint)
    marks = tools is not None and tools.has_special_tokens
    return replace(
        request,
        constraint=constraint,
        skip_special_tokens=request.skip_special_tokens and not marks,
    )


def _sampling(body: ChatCompletionRequest, vocab_size: int) -> SamplingParams:
    check_num_logprobs("prompt_logprobs", body.prompt_logprobs)
    return sampling_params(
        body,
        max_tokens=_max_tokens(body),
        logprobs=_num_top(body),
        prompt_logprobs=body.prompt_logprobs,
        drawn_seed=draw_seed(),
        vocab_size=vocab_size,
    )


def _options(
    body: ChatCompletionRequest,
    tools: ToolUse | None,
    thoughts: ThoughtUse | None,
    *,
    n: int,
) -> ChatOptions:
    def parser() -> AnswerParser:
        return AnswerParser(
            thoughts.parser() if thoughts is not None else None,
            tools.parser() if tools is not None else None,
        )

    return ChatOptions(
        n=n,
        usage=stream_usage(body),
        num_top=_num_top(body),
        num_top_of_prompt=body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        as_token_ids=bool(body.return_tokens_as_token_ids),
        parser=parser,
        shows_reasoning=body.include_reasoning is not False,
        ends_with_calls=tools is not None and not tools.is_named,
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
