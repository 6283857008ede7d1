"""POST /v1/chat/completions: the plan of a request."""

from __future__ import annotations

from typing import Any

from services.gateway.openai.chat_reply import ChatOptions, ChatReply
from services.gateway.openai.conversation import Conversation, conversation
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import Caller, Plan, PlanContext, check_common, stream_usage
from services.gateway.openai.reply import ReplyHead
from services.gateway.openai.schema import ChatCompletionRequest
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
    chat = conversation(
        body,
        raw,
        request_id=new_request_id("chatcmpl"),
        info=info,
        caller=caller,
        context=context,
    )
    head = ReplyHead(chat.request.request_id, now, info.model)
    reply = ChatReply(head, _options(body, chat))
    return Plan((chat.request,), reply, bool(body.stream), chat.spellings)


def _options(body: ChatCompletionRequest, chat: Conversation) -> ChatOptions:
    return ChatOptions(
        n=chat.request.n,
        usage=stream_usage(body),
        num_top=chat.num_top,
        num_top_of_prompt=body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        as_token_ids=bool(body.return_tokens_as_token_ids),
        parser=chat.parser,
        shows_reasoning=body.include_reasoning is not False,
        ends_with_calls=chat.tools is not None and not chat.tools.is_named,
    )
