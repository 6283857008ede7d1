"""The routes below /v1/messages: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from services.gateway import openapi
from services.gateway.anthropic.errors import PATH
from services.gateway.anthropic.plan import plan_count
from services.gateway.anthropic.replies import (
    AnthropicErrorReply,
    MessageEvent,
    MessageReplyObject,
    TokenCount,
)
from services.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from services.gateway.exchange import ExchangeContext, JsonExchange, JsonObject
from services.gateway.generation_exchange import Planner
from services.gateway.message_exchange import MessageExchange
from services.gateway.openai.plan import PlanContext


def add_message_routes(
    app: FastAPI, planner: Planner, *, planning: PlanContext, exchange: ExchangeContext
) -> None:
    """Add the routes.

    Args:
        app: The application.
        planner: Plans messages.
        planning: What plans are made with.
        exchange: What exchanges use.
    """
    tag: Mapping[str, Any] = {"response_class": Response, "tags": ["messages"]}

    async def count(body: JsonObject) -> JsonObject:
        model, prompt = plan_count(body, planning)
        _, ids = await exchange.client.render(model, prompt)
        return {"input_tokens": len(ids)}

    @app.post(
        PATH,
        **tag,
        summary="Continue a conversation, in Anthropic's shape",
        openapi_extra=openapi.body_of(MessagesRequest),
        responses=openapi.with_events(
            openapi.replies_of(MessageReplyObject, error=AnthropicErrorReply),
            MessageEvent,
            last="message_stop or error",
        ),
    )
    async def create() -> Response:
        return MessageExchange(planner, exchange)

    @app.post(
        f"{PATH}/count_tokens",
        **tag,
        summary="Tokens of a conversation",
        openapi_extra=openapi.body_of(CountTokensRequest),
        responses=openapi.replies_of(TokenCount, error=AnthropicErrorReply),
    )
    async def count_tokens() -> Response:
        return JsonExchange(count, exchange)
