"""POST /v1/responses: an exchange that makes a response, or has it made in the background."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.types import Scope

from services.common.errors import SluicewayError
from services.gateway.event_log import EventLog
from services.gateway.exchange import ExchangeContext, JsonObject, send_json
from services.gateway.generation import ChatPrompt
from services.gateway.generation_exchange import GenerationExchange, in_client_words
from services.gateway.openai.plan import Caller
from services.gateway.openai.responses.events import error_event
from services.gateway.openai.responses.plan import ResponsePlan
from services.gateway.openai.responses.reply import ResponseReply
from services.gateway.response_jobs import ResponseJobs
from services.gateway.sse import EventStream

ResponsePlanner = Callable[[JsonObject, Caller], ResponsePlan]


class ResponseExchange(GenerationExchange):
    """The reply to a request for a response."""

    def __init__(
        self, planner: ResponsePlanner, jobs: ResponseJobs, context: ExchangeContext
    ) -> None:
        """
        Args:
            planner: Makes a plan of the parsed body.
            jobs: Those that are made in the background.
            context: What it uses.
        """
        super().__init__(lambda body, caller: planner(body, caller).plan, context)
        self._plan_response = planner
        self._jobs = jobs
        self._reply: ResponseReply | None = None
        self._events = EventLog()

    async def answer(self, body: JsonObject, scope: Scope, stream: EventStream) -> None:
        """See ``Exchange``."""
        caller = self.caller_of(scope)
        planned = self._plan_response(body, caller)
        if planned.is_background:
            await self._have_made(planned, caller, stream)
        else:
            self._reply = planned.reply
            await self._make(planned, stream)

    async def _make(self, planned: ResponsePlan, stream: EventStream) -> None:
        """Make the response and give the reply, once the conversation fits."""
        plan = planned.plan
        if planned.truncation is not None:
            (request,) = plan.requests

            async def count(prompt: ChatPrompt) -> int:
                _, ids = await self.context.client.render(request.model, prompt)
                return len(ids)

            with in_client_words(plan.in_client_words):
                plan = planned.with_prompt(await planned.truncation.fitted(count))
        await self.carry_out(plan, stream)

    async def _have_made(self, planned: ResponsePlan, caller: Caller, stream: EventStream) -> None:
        """Have the response made, and tell of it until the client goes; the places go with it."""
        work = partial(self._make, planned)
        told = planned.reply.as_json()
        job = self._jobs.start(planned, work, tenant=caller.tenant, held=self.held.pop_all())
        if planned.plan.is_stream:
            self._events = job.log
            await stream.copy(job.log.read(0))
        else:
            await send_json(told, stream.send)

    def error_event(self, error: SluicewayError) -> bytes:
        """See ``Exchange``: the response has failed, and is kept so; not so in the background."""
        if self._reply is not None:
            return self._reply.fail(error)
        return error_event(error, number=len(self._events.events))
