"""One HTTP request that generates text, from its body to its last byte.

The order: a place inside, the body, the plan, admission by the tokenizers, headers, text. Until the
headers an error is a plain HTTP error; after them it is the last line of the stream. If the client
goes, everything that was started for it is cancelled at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import SluicewayError
from services.common.telemetry import get_logger
from services.gateway.admission import Admission
from services.gateway.body import parse_object, read_body
from services.gateway.disconnect import ClientGone, until_gone
from services.gateway.generation import TextPrompt, Update
from services.gateway.http_errors import error_event, error_response, unexpected
from services.gateway.metrics import GatewayMetrics, RequestRecord
from services.gateway.openai.plan import Caller, Plan
from services.gateway.sse import EventStream
from services.gateway.tokenizer_client import Generation, TokenizerClient
from services.gateway.trace import trace_of

log = get_logger(__name__)
Planner = Callable[[dict[str, Any], Caller], Plan]


class ExchangeContext:
    """What every exchange uses."""

    def __init__(
        self,
        *,
        client: TokenizerClient,
        admission: Admission,
        metrics: GatewayMetrics,
        max_body_bytes: int,
    ) -> None:
        """
        Args:
            client: Link to the tokenizers.
            admission: The door.
            metrics: Where requests are recorded.
            max_body_bytes: Largest body that is taken.
        """
        self.client = client
        self.admission = admission
        self.metrics = metrics
        self.max_body_bytes = max_body_bytes


class Exchange(Response):
    """The reply to a request that generates text; all the work is done while it is sent."""

    def __init__(self, planner: Planner, context: ExchangeContext) -> None:
        """
        Args:
            planner: Makes a plan of the parsed body.
            context: What it uses.
        """
        super().__init__()
        self._planner = planner
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answer the request, whatever happens."""
        stream = EventStream(send)
        try:
            with self._context.admission.slot():
                await self._answer(scope, receive, stream)
        except ClientGone:
            log.info("client_gone", path=scope["path"])
        except SluicewayError as error:
            await self._fail(error, scope, receive, stream)
        except Exception as error:
            await self._fail(unexpected(error), scope, receive, stream)

    async def _fail(
        self, error: SluicewayError, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        log.info("request_failed", error=type(error).__name__, message=error.message)
        if stream.has_started:
            await stream.end(error_event(error))
        else:
            await error_response(error)(scope, receive, stream.send)

    async def _answer(self, scope: Scope, receive: Receive, stream: EventStream) -> None:
        arrival = time.monotonic()
        headers = Headers(scope=scope)
        body = await read_body(receive, headers=headers, max_bytes=self._context.max_body_bytes)
        caller = Caller(tenant=scope.get("tenant", ""), trace=trace_of(headers))
        plan = self._planner(parse_object(body), caller)
        with self._context.metrics.record(plan.requests, arrival=arrival) as record:
            await until_gone(
                self._generate(plan, record, stream),
                receive=receive,
                cut_off=self._context.admission.wait_cut_off,
            )

    async def _generate(self, plan: Plan, record: RequestRecord, stream: EventStream) -> None:
        with ExitStack() as running:
            generations = await self._admit(plan, running)
            if plan.is_stream:
                await stream.start()
            await self._give_prompt_texts(plan, generations)
            if plan.is_stream:
                await self._stream(plan, generations, record, stream)
            else:
                await self._collect(plan, generations, record, stream.send)

    async def _admit(self, plan: Plan, running: ExitStack) -> list[Generation]:
        """Have every prompt admitted; whatever happens later, none is left running."""

        async def admit(index: int) -> None:
            generation = await self._context.client.admit(plan.requests[index])
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
        return await self._context.client.detokenize(model, ids, skip_special_tokens=False)

    async def _stream(
        self,
        plan: Plan,
        generations: list[Generation],
        record: RequestRecord,
        stream: EventStream,
    ) -> None:
        async def write(prompt_index: int, update: Update) -> None:
            record.update(prompt_index, update, now=time.monotonic())
            await stream.write(plan.reply.events(prompt_index, update))

        await _pump(generations, write)
        await stream.end(plan.reply.last_events())

    async def _collect(
        self, plan: Plan, generations: list[Generation], record: RequestRecord, send: Send
    ) -> None:
        async def keep(prompt_index: int, update: Update) -> None:
            record.update(prompt_index, update, now=time.monotonic())
            plan.reply.absorb(prompt_index, update)

        await _pump(generations, keep)
        await _send_json(plan.reply.whole(), send)


async def _pump(generations: list[Generation], take: Any) -> None:
    """Hand every update of every generation on, those of one prompt in order."""
    if len(generations) == 1:
        await _pump_one(0, generations[0], take)
        return
    async with asyncio.TaskGroup() as group:
        for index, generation in enumerate(generations):
            group.create_task(_pump_one(index, generation, take))


async def _pump_one(prompt_index: int, generation: Generation, take: Any) -> None:
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


async def _send_json(body: dict[str, Any], send: Send) -> None:
    payload = orjson.dumps(body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(payload)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
