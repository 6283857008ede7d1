"""What the routes below /v1/responses do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import InvalidRequest
from services.gateway.disconnect import ClientGone, until_gone
from services.gateway.event_log import EventLog
from services.gateway.exchange import ExchangeContext, JsonObject
from services.gateway.openai.plan import INT32_LIMIT, Caller, PlanContext
from services.gateway.openai.responses.listing import list_page, page_of
from services.gateway.openai.responses.plan import ResponsePlan, plan_response
from services.gateway.openai.responses.query import bool_of, int_of
from services.gateway.openai.responses.store import ResponseStore, Turn
from services.gateway.response_exchange import ResponseExchange
from services.gateway.response_jobs import ResponseJobs
from services.gateway.sse import EventStream


class ResponseRoutes:
    """Makes responses, and gives those that are kept."""

    def __init__(
        self,
        *,
        planning: PlanContext,
        exchange: ExchangeContext,
        store: ResponseStore,
        jobs: ResponseJobs,
    ) -> None:
        """
        Args:
            planning: What plans are made with.
            exchange: What exchanges use.
            store: Where responses are kept.
            jobs: Those that are made in the background.
        """
        self._planning = planning
        self._exchange = exchange
        self._store = store
        self._jobs = jobs

    def create(self) -> ResponseExchange:
        """Reply of POST /v1/responses."""
        return ResponseExchange(self._plan, self._jobs, self._exchange)

    def _plan(self, body: JsonObject, caller: Caller) -> ResponsePlan:
        self._check_not_running(body.get("previous_response_id"), caller)
        return plan_response(body, caller, self._planning, store=self._store, clock=time.time)

    def _check_not_running(self, response_id: object, caller: Caller) -> None:
        field = "previous_response_id"
        job = self._jobs.get(caller.tenant, response_id) if isinstance(response_id, str) else None
        if job is not None:
            status = job.planned.reply.status
            raise InvalidRequest(f"{field}: that response is still {status}", param=field)

    def _find(self, tenant: str, response_id: str) -> Turn:
        """A response that is kept, or as much as there is of one that is being made."""
        job = self._jobs.get(tenant, response_id)
        return self._store.get(tenant, response_id) if job is None else job.as_turn()

    def retrieve(self, tenant: str, response_id: str, query: Mapping[str, str]) -> Response:
        """A response; with stream true its events.

        Raises:
            InvalidRequest: Names the parameter of the query.
            NotFound: It is not kept.
        """
        after = int_of(query, "starting_after", low=0, high=INT32_LIMIT)
        if bool_of(query, "stream"):
            return EventReader(self._log(tenant, response_id), 0 if after is None else after + 1)
        return _json(self._find(tenant, response_id).response)

    def _log(self, tenant: str, response_id: str) -> EventLog:
        events = self._find(tenant, response_id).events
        if not events:
            raise InvalidRequest(
                "stream: only a response made with background and stream true is streamed again",
                param="stream",
            )
        job = self._jobs.get(tenant, response_id)
        return EventLog(events, is_closed=True) if job is None else job.log

    def input_items(self, tenant: str, response_id: str, query: Mapping[str, str]) -> Response:
        """The items that a response was given.

        Raises:
            InvalidRequest: Names the parameter of the query.
            NotFound: It is not kept.
        """
        page = page_of(query)
        given = orjson.loads(self._find(tenant, response_id).given)
        return _json(orjson.dumps(list_page(given, page)))

    async def cancel(self, tenant: str, response_id: str) -> Response:
        """End a response that is made in the background; one that has ended stays as it is.

        Raises:
            InvalidRequest: It was not made in the background.
            NotFound: It is not kept.
        """
        job = self._jobs.get(tenant, response_id)
        if job is not None:
            await job.cancel()
            return _json(job.as_json())
        response = self._store.get(tenant, response_id).response
        if not orjson.loads(response)["background"]:
            raise InvalidRequest(
                "only a response made with background true can be cancelled; of any other, "
                "close the connection",
                param="response_id",
            )
        return _json(response)

    async def delete(self, tenant: str, response_id: str) -> Response:
        """Forget a response; one that is being made is cancelled.

        Raises:
            NotFound: It is not kept.
        """
        job = self._jobs.get(tenant, response_id)
        if job is not None:
            await job.cancel()
        self._store.delete(tenant, response_id)
        return _json(orjson.dumps({"id": response_id, "object": "response", "deleted": True}))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class EventReader(Response):
    """Events as they come, for a reader who has come late."""

    def __init__(self, events: EventLog, start: int) -> None:
        """
        Args:
            events: Of a response.
            start: Number of the first that is wanted.
        """
        super().__init__()
        self._events = events
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        work = EventStream(send).copy(self._events.read(self._start))
        with suppress(ClientGone):
            await until_gone(work, receive=receive)
