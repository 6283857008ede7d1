"""An exchange that generates text: plan, admission by the tokenizers, headers, text.

If the client goes, everything that was started for it is cancelled at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from services.common.errors import InvalidRequest
from services.gateway.disconnect import first_of
from services.gateway.exchange import Exchange, ExchangeContext, JsonObject, send_json
from services.gateway.generation import TextPrompt, Update
from services.gateway.metrics import RequestRecord
from services.gateway.openai.plan import Caller, Plan
from services.gateway.sse import EventStream
from services.gateway.tokenizer_client import Generation
from services.gateway.trace import trace_of

Planner = Callable[[JsonObject, Caller], Plan]
Respell = Callable[[InvalidRequest], InvalidRequest]
TakeUpdate = Callable[[int, Update], Awaitable[None]]


class GenerationExchange(Exchange):
    """The reply to a request that generates text."""

    def __init__(self, planner: Planner, context: ExchangeContext) -> None:
        """
        Args:
            planner: Makes a plan of the parsed body.
            context: What it uses.
        """
        super().__init__(context)
        self._planner = planner
        self._tenant = ""
        self._arrival = time.monotonic()

    async def answer(self, body: JsonObject, scope: Scope, stream: EventStream) -> None:
        """See ``Exchange``."""
        await self.carry_out(self._planner(body, self.caller_of(scope)), stream)

    def caller_of(self, scope: Scope) -> Caller:
        """Who sends the request; to be called before ``carry_out``."""
        self._tenant = scope.get("tenant", "")
        return Caller(self._tenant, trace_of(Headers(scope=scope)))

    async def carry_out(self, plan: Plan, stream: EventStream) -> None:
        """Generate what was planned and give the reply.

        Raises:
            SluicewayError: What is to be told instead, alone or in groups.
        """
        with (
            self.context.metrics.record(plan.requests, arrival=self._arrival) as record,
            in_client_words(plan.in_client_words),
        ):
            await self._generate(plan, record, stream)

    async def _generate(self, plan: Plan, record: RequestRecord, stream: EventStream) -> None:
        with ExitStack() as running:
            generations = await self._admit(plan, running)
            # A constraint that the worker refuses is refused as any other: before the headers.
            if plan.is_stream and all(request.constraint is None for request in plan.requests):
                await stream.start()
            await self._give_prompt_texts(plan, generations)
            if plan.is_stream:
                await self._stream(plan, generations, record, stream)
            else:
                await self._collect(plan, generations, record, stream.send)

    async def _admit(self, plan: Plan, running: ExitStack) -> list[Generation]:
        """Have every prompt admitted; whatever happens later, none is left running."""

        async def admit(index: int) -> None:
            generation = await self.context.client.admit(plan.requests[index])
            running.callback(generation.cancel)
            admitted[index] = generation

        admitted: dict[int, Generation] = {}
        if len(plan.requests) == 1:
            await admit(0)
        else:
            async with asyncio.TaskGroup() as group:
                for index in range(len(plan.requests)):
                    group.create_task(admit(index))
        return [admitted[index] for index in sorted(admitted)]

    async def _give_prompt_texts(self, plan: Plan, generations: list[Generation]) -> None:
        """Tell the reply what its prompts read, if it echoes them."""
        if not plan.reply.needs_prompt_text:
            return
        for index, (request, generation) in enumerate(zip(plan.requests, generations, strict=True)):
            ids = list(generation.first.prompt_ids or ())
            prompt = request.prompt
            if isinstance(prompt, TextPrompt) and request.truncate_prompt_tokens is None:
                text = prompt.text
            else:
                text = await self._text_of(request.model, ids)
            first = await self._text_of(request.model, ids[:1])
            plan.reply.set_prompt(index, text=text, first_token_text=first)

    async def _text_of(self, model: str, ids: list[int]) -> str:
        return await self.context.client.detokenize(model, ids, skip_special_tokens=False)

    async def _stream(
        self,
        plan: Plan,
        generations: list[Generation],
        record: RequestRecord,
        stream: EventStream,
    ) -> None:
        async def write(prompt_index: int, update: Update) -> None:
            self._account_for(prompt_index, update, record)
            await stream.write(plan.reply.events(prompt_index, update))

        await _pump_all(generations, write)
        await stream.end(plan.reply.last_events())

    async def _collect(
        self, plan: Plan, generations: list[Generation], record: RequestRecord, send: Send
    ) -> None:
        async def keep(prompt_index: int, update: Update) -> None:
            self._account_for(prompt_index, update, record)
            plan.reply.absorb(prompt_index, update)

        await _pump_all(generations, keep)
        await send_json(plan.reply.whole(), send)

    def _account_for(self, prompt_index: int, update: Update, record: RequestRecord) -> None:
        """Enter an update into the metrics and into what the caller's key has used."""
        record.update(prompt_index, update, now=time.monotonic())
        self.context.key_limits.charge(self._tenant, num_tokens(update))


def num_tokens(update: Update) -> int:
    """Tokens that an update tells of: the prompt's with the first one, then each choice's."""
    num_output = sum(len(choice.token_ids) for choice in update.choices)
    return len(update.prompt_ids or ()) + num_output


@contextmanager
def in_client_words(respell: Respell) -> Iterator[None]:
    """Errors of the other services name fields as this client's body does.

    Those of the prompts come as a group.

    Args:
        respell: Gives an error that names the field as the body does.
    """
    try:
        yield
    except* InvalidRequest as errors:
        error = first_of(errors)
        assert isinstance(error, InvalidRequest)
        raise respell(error) from None


async def _pump_all(generations: list[Generation], take: TakeUpdate) -> None:
    """Hand every update of every generation on, those of one prompt in order."""
    # Also a single one in a task of its own: what wakes it for each token need not go through all
    # the coroutines and middleware that wait for it.
    async with asyncio.TaskGroup() as group:
        for index, generation in enumerate(generations):
            group.create_task(pump(index, generation, take))


async def pump(prompt_index: int, generation: Generation, take: TakeUpdate) -> None:
    """Hand every update of a generation on.

    Raises:
        SluicewayError: A choice failed, or the generation was lost.
    """
    update: Update | None = generation.first
    while update is not None:
        _raise_failure(update)
        await take(prompt_index, update)
        update = await generation.next()


def _raise_failure(update: Update) -> None:
    """A choice that failed fails its request: half an answer is none."""
    for choice in update.choices:
        if choice.finish is not None and choice.finish.error is not None:
            raise choice.finish.error
