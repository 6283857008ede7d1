"""POST /v1/responses: an exchange that generates a response."""

from __future__ import annotations

from collections.abc import Callable

from services.common.errors import SluicewayError
from services.gateway.exchange import ExchangeContext, JsonObject
from services.gateway.generation_exchange import GenerationExchange
from services.gateway.openai.plan import Caller, Plan
from services.gateway.openai.responses.plan import ResponsePlan
from services.gateway.openai.responses.reply import ResponseReply

ResponsePlanner = Callable[[JsonObject, Caller], ResponsePlan]


class ResponseExchange(GenerationExchange):
    """The reply to a request for a response."""

    def __init__(self, planner: ResponsePlanner, context: ExchangeContext) -> None:
        """
        Args:
            planner: Makes a plan of the parsed body.
            context: What it uses.
        """
        super().__init__(self._plan, context)
        self._plan_response = planner
        self._reply: ResponseReply | None = None

    def _plan(self, body: JsonObject, caller: Caller) -> Plan:
        planned = self._plan_response(body, caller)
        self._reply = planned.reply
        return planned.plan

    def error_event(self, error: SluicewayError) -> bytes:
        """See ``Exchange``: the response has failed, and is kept so."""
        assert self._reply is not None, "a stream has started before there was a plan"
        return self._reply.fail(error)
