"""POST /v1/messages and its count_tokens: the plans of requests. They become chats."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

from services.gateway.anthropic.block_types import check_types
from services.gateway.anthropic.chat_body import chat_body, conversation_body
from services.gateway.anthropic.fields import (
    INSTEAD,
    REFUSED,
    REFUSED_OF_OUTPUT,
    REFUSED_OF_TOOLS,
    in_own_words,
    own_names,
)
from services.gateway.anthropic.reply import MessageOptions, MessageReply
from services.gateway.anthropic.schema import (
    ConversationBody,
    CountTokensRequest,
    MessagesRequest,
)
from services.gateway.generation import ChatPrompt
from services.gateway.openai.conversation import Conversation, conversation
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import Caller, Plan, PlanContext, check_common
from services.gateway.openai.schema import ChatCompletionRequest

JsonObject = dict[str, Any]
B = TypeVar("B", bound=ConversationBody)


def plan_message(raw: JsonObject, caller: Caller, context: PlanContext, *, now: int) -> Plan:
    """Check a request for a message and say what is to be done for it.

    Args:
        raw: The parsed body.
        caller: Who sends it.
        context: What planning knows.
        now: Unix seconds; the reply does not tell them.

    Raises:
        InvalidRequest: Names the field at fault.
        ModelNotFound: No such model.
    """
    body = _checked(raw, MessagesRequest, context)
    chat = chat_body(body, knows_thoughts=_knows_thoughts(body, context))
    message_id = f"msg_{secrets.token_hex(12)}"
    talk = _conversation(chat, message_id, caller, context)
    is_omitted = body.thinking is not None and body.thinking.display == "omitted"
    options = MessageOptions(message_id, talk.request.model, shows_thoughts=not is_omitted)
    reply = MessageReply(options, parser=talk.parser())
    return Plan((talk.request,), reply, bool(body.stream), own_names(talk.spellings))


def plan_count(raw: JsonObject, context: PlanContext) -> tuple[str, ChatPrompt]:
    """Check a conversation whose tokens are to be counted.

    Returns:
        The model, and the conversation to be rendered.

    Raises:
        InvalidRequest: Names the field at fault.
        ModelNotFound: No such model.
    """
    body = _checked(raw, CountTokensRequest, context)
    chat = conversation_body(body, knows_thoughts=_knows_thoughts(body, context))
    request = _conversation(chat, "count", Caller(), context).request
    assert isinstance(request.prompt, ChatPrompt)
    return request.model, request.prompt


def _checked(raw: JsonObject, model: type[B], context: PlanContext) -> B:
    check_types(raw)
    body = validate(raw, model)
    fields = context.unknown_fields
    fields.check(body.model_extra, also_refused=REFUSED, instead=INSTEAD)
    for index, tool in enumerate(body.tools or ()):
        fields.check(tool.model_extra, also_refused=REFUSED_OF_TOOLS, where=f"tools[{index}].")
    if body.output_config is not None:
        extra = body.output_config.model_extra
        fields.check(extra, also_refused=REFUSED_OF_OUTPUT, where="output_config.")
    return body


def _knows_thoughts(body: ConversationBody, context: PlanContext) -> bool:
    info = context.fleet.resolve_model(body.model)
    return context.parsers.thought_format(info.model) is not None


def _conversation(
    chat: JsonObject, request_id: str, caller: Caller, context: PlanContext
) -> Conversation:
    with in_own_words():
        body = validate(chat, ChatCompletionRequest)
        info = check_common(body, context, also_refused={})
        return conversation(
            body, chat, request_id=request_id, info=info, caller=caller, context=context
        )
