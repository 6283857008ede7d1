"""POST /v1/responses: the plan of a request. It becomes a chat, whose rules it shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from services.common.errors import InvalidRequest, NotFound
from services.gateway.generation import ChatPrompt, GenerationRequest
from services.gateway.openai.conversation import conversation
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import Caller, Plan, PlanContext, check_common
from services.gateway.openai.responses.chat_body import chat_body
from services.gateway.openai.responses.checks import checked_body
from services.gateway.openai.responses.events import EventWriter, NoEvents
from services.gateway.openai.responses.fields import in_own_words, own_names
from services.gateway.openai.responses.head import response_head
from services.gateway.openai.responses.items import Item, items_of, new_item_id, resolved
from services.gateway.openai.responses.reply import ResponseOptions, ResponseReply
from services.gateway.openai.responses.schema import ResponseRequest
from services.gateway.openai.responses.store import ResponseStore, Turn
from services.gateway.openai.responses.transcript import check_calls
from services.gateway.openai.responses.truncation import Truncation
from services.gateway.openai.schema import ChatCompletionRequest

ENDED_WELL = ("completed", "incomplete")

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A checked request.

    Attributes:
        plan: What is generated, and the reply.
        reply: The same reply.
        given: The request's own items.
        before: What it goes on from.
        is_background: Whether the client does not wait; then who runs it keeps it.
        truncation: How the conversation is made to fit; ``None`` = it must as it is.
    """

    plan: Plan
    reply: ResponseReply
    given: list[Item]
    before: Turn | None
    is_background: bool
    truncation: Truncation | None

    def with_prompt(self, prompt: ChatPrompt) -> Plan:
        """The plan with another prompt."""
        (request,) = self.plan.requests
        return replace(self.plan, requests=(replace(request, prompt=prompt),))


def plan_response(
    raw: JsonObject,
    caller: Caller,
    context: PlanContext,
    *,
    store: ResponseStore,
    clock: Callable[[], float],
) -> ResponsePlan:
    """Check a request and say what is to be done for it.

    Args:
        raw: The parsed body.
        caller: Who sends it.
        context: What planning knows.
        store: Where responses are kept.
        clock: Unix seconds.

    Raises:
        InvalidRequest: Names the field at fault.
        ModelNotFound: No such model.
    """
    body = checked_body(raw, context)
    before = _before(body, caller, store)
    given = resolved(items_of(body.input), lambda item_id: store.item(caller.tenant, item_id))
    history = [] if before is None else before.conversation()
    check_calls(history, given)
    items = [*history, *given]
    chat = chat_body(body, raw, items)
    with in_own_words():
        validated = validate(chat, ChatCompletionRequest)
        info = check_common(validated, context, also_refused={})
        talk = conversation(
            validated,
            chat,
            request_id=new_item_id("resp"),
            info=info,
            caller=caller,
            context=context,
        )
    is_background = bool(body.background)

    def keep(response: JsonObject) -> None:
        store.put(caller.tenant, response["id"], Turn.of(response, given=given, before=before))

    reply = ResponseReply(
        ResponseOptions(
            head=response_head(body, talk, created_at=int(clock())),
            num_top=talk.num_top,
            shows_reasoning=body.include_reasoning is not False,
            is_background=is_background,
        ),
        parser=talk.parser(),
        events=EventWriter() if body.stream else NoEvents(),
        clock=clock,
        on_end=None if is_background or body.store is False else keep,
    )
    plan = Plan((talk.request,), reply, bool(body.stream), own_names(talk.spellings))
    truncation = _truncation(body, talk.request, items, info.max_model_len)
    return ResponsePlan(plan, reply, given, before, is_background, truncation)


def _truncation(
    body: ResponseRequest, request: GenerationRequest, items: list[Item], max_model_len: int
) -> Truncation | None:
    if body.truncation != "auto" or not max_model_len:
        return None
    assert isinstance(request.prompt, ChatPrompt)
    room = max_model_len - (request.sampling.max_tokens or 1)
    return Truncation(request.prompt, body.instructions, items, room)


def _before(body: ResponseRequest, caller: Caller, store: ResponseStore) -> Turn | None:
    """What the request goes on from."""
    if body.previous_response_id is None:
        return None
    field = "previous_response_id"
    try:
        turn = store.get(caller.tenant, body.previous_response_id)
    except NotFound as error:
        raise InvalidRequest(
            f"{field}: {error.message}", param=field, code="previous_response_not_found"
        ) from None
    status = orjson.loads(turn.response)["status"]
    if status not in ENDED_WELL:
        raise InvalidRequest(f"{field}: that response is {status}; nothing goes on", param=field)
    return turn
