"""What the routes below /v1/responses do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson

from services.gateway.exchange import ExchangeContext, JsonObject
from services.gateway.openai.plan import Caller, PlanContext
from services.gateway.openai.responses.listing import list_page, page_of
from services.gateway.openai.responses.plan import ResponsePlan, plan_response
from services.gateway.openai.responses.store import ResponseStore
from services.gateway.response_exchange import ResponseExchange


class ResponseRoutes:
    """Makes responses, and gives those that are kept."""

    def __init__(
        self, *, planning: PlanContext, exchange: ExchangeContext, store: ResponseStore
    ) -> None:
        """
        Args:
            planning: What plans are made with.
            exchange: What exchanges use.
            store: Where responses are kept.
        """
        self._planning = planning
        self._exchange = exchange
        self._store = store

    def create(self) -> ResponseExchange:
        """Reply of POST /v1/responses."""
        return ResponseExchange(self._plan, self._exchange)

    def _plan(self, body: JsonObject, caller: Caller) -> ResponsePlan:
        return plan_response(body, caller, self._planning, store=self._store, clock=time.time)

    def retrieve(self, tenant: str, response_id: str) -> bytes:
        """JSON of a response.

        Raises:
            NotFound: It is not kept.
        """
        return self._store.get(tenant, response_id).response

    def input_items(
        self, tenant: str, response_id: str, query: Mapping[str, str]
    ) -> dict[str, Any]:
        """The items that a response was given.

        Raises:
            InvalidRequest: Names the parameter of the query.
            NotFound: It is not kept.
        """
        page = page_of(query)
        return list_page(orjson.loads(self._store.get(tenant, response_id).given), page)

    def delete(self, tenant: str, response_id: str) -> dict[str, Any]:
        """Forget a response.

        Raises:
            NotFound: It is not kept.
        """
        self._store.delete(tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}
