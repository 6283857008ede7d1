"""An exchange that gives vectors: the inputs of one request run side by side, some at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.exchange import Exchange, ExchangeContext, JsonObject, send_json
from services.gateway.generation import Finish, GenerationRequest, Update
from services.gateway.generation_exchange import in_client_words, num_tokens, pump
from services.gateway.metrics import RequestRecord
from services.gateway.openai.embeddings import EmbeddingPlan
from services.gateway.openai.plan import Caller, respelled
from services.gateway.sse import EventStream
from services.gateway.trace import trace_of

MAX_AT_ONCE = 128
"""Inputs of one request that run at one time: the queue is for everybody."""

EmbeddingPlanner = Callable[[JsonObject, Caller], EmbeddingPlan]


class EmbeddingsExchange(Exchange):
    """The reply to a request for vectors."""

    def __init__(self, planner: EmbeddingPlanner, context: ExchangeContext) -> None:
        """
        Args:
            planner: Makes a plan of the parsed body.
            context: What it uses.
        """
        super().__init__(context)
        self._planner = planner
        self._tenant = ""
        self._arrival = time.monotonic()
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def answer(self, body: JsonObject, scope: Scope, stream: EventStream) -> None:
        """See ``Exchange``."""
        self._tenant = scope.get("tenant", "")
        plan = self._planner(body, Caller(self._tenant, trace_of(Headers(scope=scope))))
        with self.context.metrics.record(plan.requests, arrival=self._arrival) as record:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._run(index, request, name=name, record=record))
                    for index, (request, name) in enumerate(
                        zip(plan.requests, plan.names, strict=True)
                    )
                ]
        await send_json(plan.reply([task.result() for task in running]), stream.send)

    async def _run(
        self, index: int, request: GenerationRequest, *, name: str, record: RequestRecord
    ) -> Finish:
        """Have one input computed.

        Raises:
            SluicewayError: It was refused, has failed or was lost.
        """
        ends: list[Finish] = []

        async def take(_: int, update: Update) -> None:
            record.update(index, update, now=time.monotonic())
            self.context.key_limits.charge(self._tenant, num_tokens(update))
            ends.extend(choice.finish for choice in update.choices if choice.finish is not None)

        async with self._places:
            with in_client_words(partial(respelled, spellings={"prompt": name})):
                generation = await self.context.client.admit(request)
                try:
                    await pump(index, generation, take)
                finally:
                    generation.cancel()
        (end,) = ends
        return end
