"""The gateway's link to the tokenizers: a connection to each, round robin over the ready ones.

An Info stream per tokenizer keeps the fleet's picture fresh. A generation is one gRPC stream; until
its first message it may be moved to another copy, after that a loss is an error of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from itertools import count
from typing import TypeVar, cast

import grpc

from services.common.errors import (
    Cancelled,
    InvariantError,
    SluicewayError,
    Unavailable,
    WorkerLost,
)
from services.common.pb import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.common.rpc import Endpoints, connect, translate
from services.common.telemetry import bind_request, get_logger
from services.gateway.convert import (
    chat_to_message,
    info_from_message,
    request_to_message,
    update_from_message,
)
from services.gateway.feed import Feed, Inbox
from services.gateway.fleet import Fleet
from services.gateway.generation import ChatPrompt, GenerationRequest, Update

MAX_ATTEMPTS = 4
SIDE_CALL_TIMEOUT_S = 10.0
RETRY_PAUSE_S = 0.1
CLOSE_GRACE_S = 60.0
LAST_WORDS_S = 1.0

log = get_logger(__name__)
R = TypeVar("R")
GenerateCall = grpc.aio.UnaryStreamCall[tokenizer_pb2.GenerateRequest, tokenizer_pb2.TextDelta]


class Generation:
    """An admitted generation: ``first`` and then ``next`` until it gives ``None``.

    Call ``cancel`` when done, whatever happened: it frees what a running generation holds and does
    nothing to an ended one.
    """

    def __init__(
        self,
        call: GenerateCall,
        first: Update,
        *,
        n: int,
        inbox: Inbox | None,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """
        Args:
            call: The gRPC stream; its first message has been read.
            first: That message.
            n: Number of choices that must each end once.
            inbox: Where the others come; ``None`` = by the call.
            tasks: Outlives it.
        """
        self.first = first
        self._call = call
        self._inbox = inbox
        self._last_words = None if inbox is None else tasks.create_task(self._hear_end(inbox))
        self._progress = [0] * n
        self._open = set(range(n))
        self._check(first)

    async def next(self) -> Update | None:
        """The next update; ``None`` once every choice has ended.

        Raises:
            SluicewayError: The stream broke, ended without a finish, or lost something.
        """
        if not self._open:
            await self._see_off()
            return None
        if self._inbox is not None:
            update = update_from_message(await self._inbox.next())
        else:
            message = await _read(self._call)
            if message is None:
                raise _ended_early()
            update = update_from_message(message)
        self._check(update)
        return update

    async def _hear_end(self, inbox: Inbox) -> None:
        """Wait for the end of the call; nothing else comes by it."""
        try:
            if await _read(self._call) is not None:
                inbox.fail(InvariantError("a message that belongs into the feed came by the call"))
            # What the feed brings may be a little later.
            await asyncio.sleep(LAST_WORDS_S)
            inbox.fail(_ended_early())
        except SluicewayError as error:
            inbox.fail(error)

    async def _see_off(self) -> None:
        """Take in the clean end of the stream, so that ``cancel`` finds nothing to cancel."""
        with contextlib.suppress(SluicewayError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                if self._last_words is None:
                    await _read(self._call)
                else:
                    await self._call.code()

    def cancel(self) -> None:
        """End the stream; the tokenizer aborts what is still running."""
        if self._last_words is not None:
            self._last_words.cancel()
        if self._inbox is not None:
            self._inbox.close()
        self._call.cancel()

    def _check(self, update: Update) -> None:
        """Nothing may be lost or repeated, and nothing may follow a finish."""
        for choice in update.choices:
            index = choice.index
            if index not in self._open:
                raise InvariantError(f"got an update of choice {index}, which is not open")
            if choice.num_tokens != self._progress[index]:
                raise InvariantError(
                    f"choice {index}: got tokens from {choice.num_tokens} on, "
                    f"expected {self._progress[index]}"
                )
            self._progress[index] += len(choice.token_ids)
            if choice.finish is not None:
                self._open.discard(index)


class TokenizerClient:
    """Connections to every tokenizer; run ``run`` in a task for as long as it is used."""

    def __init__(
        self, addresses: Sequence[str], *, fleet: Fleet, cluster_token: str | None
    ) -> None:
        """
        Args:
            addresses: "host:port" or "dns:///name:port".
            fleet: Where what the tokenizers say is kept.
            cluster_token: Secret of the cluster, if any.
        """
        self._endpoints = Endpoints(addresses)
        self._fleet = fleet
        self._token = cluster_token
        self._peers: dict[str, _Peer] = {}
        self._turn = count()
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Keep a connection and an Info stream to each address, until cancelled."""
        try:
            await self._keep_linked()
        finally:
            for peer in self._peers.values():
                await peer.channel.close()

    async def _keep_linked(self) -> None:
        async with self._tasks as group:
            async for addresses in self._endpoints.watch():
                for address in self._peers.keys() - addresses:
                    retired = self._peers.pop(address)
                    retired.follower.cancel()
                    group.create_task(retired.channel.close(CLOSE_GRACE_S))
                for address in sorted(addresses - self._peers.keys()):
                    channel = connect(address, cluster_token=self._token)
                    follower = group.create_task(self._follow(address, channel))
                    peer = self._peers[address] = _Peer(address, channel, follower)
                    group.create_task(peer.read_feed())

    async def _follow(self, address: str, channel: grpc.aio.Channel) -> None:
        """Copy a tokenizer's Info stream into the fleet, again and again."""
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        while True:
            await self._follow_once(address, stub)
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _follow_once(self, address: str, stub: tokenizer_pb2_grpc.TokenizerAsyncStub) -> None:
        call = stub.Info(tokenizer_pb2.InfoRequest(), wait_for_ready=True)
        was_heard = False
        try:
            async for message in call:
                self._fleet.heard(address, info_from_message(message))
                was_heard = True
            if was_heard:  # one that drains ends every further stream at once: told only once
                log.warning("tokenizer_info_ended", address=address)
        except grpc.aio.AioRpcError as error:
            log.warning("tokenizer_lost", address=address, error=translate(error).message)
        finally:
            self._fleet.lost(address)
            call.cancel()

    async def admit(self, request: GenerationRequest) -> Generation:
        """Submit a request and wait for the first sign of its admission.

        A copy that is gone or not ready is replaced by the next one, each copy being tried once.

        Raises:
            Unavailable: No copy is ready.
            SluicewayError: It was refused.
        """
        tried: set[str] = set()
        last: SluicewayError | None = None
        for attempt in range(MAX_ATTEMPTS):
            address = self._choose(request.model, tried=tried)
            if address is None:
                break
            tried.add(address)
            try:
                return await self._admit_at(address, request, attempt=attempt)
            except (Unavailable, WorkerLost, InvariantError) as error:
                if isinstance(error, InvariantError) and attempt > 0:
                    raise  # a bug that two copies have is not cured by a third
                log.warning("request_moved", request_id=request.request_id, left=address)
                last = error
        raise last or self._not_ready()

    async def _admit_at(
        self, address: str, request: GenerationRequest, *, attempt: int
    ) -> Generation:
        peer = self._peers[address]
        message = request_to_message(request, attempt=attempt)
        inbox = peer.feed.open_inbox() if peer.feed.id else None
        if inbox is not None:
            message.feed_id, message.feed_call = peer.feed.id, inbox.call
        with bind_request(request_id=request.request_id):  # the call carries it
            call: GenerateCall = peer.stub.Generate(message)
        try:
            first = await _read(call, before_first=True)
            if first is None:
                raise WorkerLost("the tokenizer ended the stream before it admitted the request")
            update = update_from_message(first)
            _raise_refusal(update)
            return Generation(call, update, n=request.n, inbox=inbox, tasks=self._tasks)
        except BaseException:
            call.cancel()
            if inbox is not None:
                inbox.close()
            raise

    def _choose(self, model: str, *, tried: set[str]) -> str | None:
        ready = self._fleet.ready_addresses(model)
        untried = [address for address in ready if address not in tried and address in self._peers]
        return untried[next(self._turn) % len(untried)] if untried else None

    def _not_ready(self) -> Unavailable:
        readiness = self._fleet.readiness()
        reason = readiness.reason or "no tokenizer is ready for this model"
        return Unavailable(f"not ready: {reason}", retry_after_s=1)

    def _stub(self, model: str) -> tokenizer_pb2_grpc.TokenizerAsyncStub:
        address = self._choose(model, tried=set())
        if address is None:
            raise self._not_ready()
        return self._peers[address].stub

    async def render(self, model: str, prompt: ChatPrompt) -> tuple[str, list[int]]:
        """A conversation as the model sees it: text and token ids."""
        request = tokenizer_pb2.RenderRequest(chat=chat_to_message(prompt), model=model)
        stub = self._stub(model)
        reply = await _answer_of(stub.Render(request, timeout=SIDE_CALL_TIMEOUT_S))
        return reply.text, list(reply.ids)

    async def tokenize(
        self, model: str, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[str]]:
        """Token ids of a text, and the text of each token."""
        request = tokenizer_pb2.TokenizeRequest(
            text=text, add_special_tokens=add_special_tokens, model=model
        )
        stub = self._stub(model)
        reply = await _answer_of(stub.Tokenize(request, timeout=SIDE_CALL_TIMEOUT_S))
        return list(reply.ids), list(reply.tokens)

    async def detokenize(self, model: str, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        request = tokenizer_pb2.DetokenizeRequest(
            ids=ids, skip_special_tokens=skip_special_tokens, model=model
        )
        stub = self._stub(model)
        reply = await _answer_of(stub.Detokenize(request, timeout=SIDE_CALL_TIMEOUT_S))
        return reply.text

    async def reset_prefix_cache(self, model: str) -> dict[str, int]:
        """Have the engines of a model forget their cached prefixes.

        Returns:
            How many did (``engines_reset``), and how many had requests (``engines_busy``).
        """
        stub = self._stub(model)
        request = common_pb2.ResetCacheRequest()
        reply = await _answer_of(stub.ResetCache(request, timeout=SIDE_CALL_TIMEOUT_S))
        return {"engines_reset": reply.engines_reset, "engines_busy": reply.engines_busy}


class _Peer:
    """One tokenizer: its connection, its feed and the task that follows its Info stream."""

    def __init__(
        self, address: str, channel: grpc.aio.Channel, follower: asyncio.Task[None]
    ) -> None:
        self.channel = channel
        self.stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        self.follower = follower
        self.feed = Feed(address)

    async def read_feed(self) -> None:
        """Keep the feed open as long as the connection is."""
        with contextlib.suppress(grpc.aio.UsageError):  # the channel was closed
            while True:
                if not await self.feed.read(self.stub):
                    return
                await asyncio.sleep(RETRY_PAUSE_S)


async def _answer_of(call: Awaitable[R]) -> R:
    """The reply of a unary call, or our error."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None


def _ended_early() -> WorkerLost:
    return WorkerLost("the tokenizer ended the stream before the request was finished")


async def _read(
    call: GenerateCall, *, before_first: bool = False
) -> tokenizer_pb2.TextDelta | None:
    """The next message of a stream; ``None`` at its clean end."""
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        translated = translate(error)
        # A peer that ends a call which we did not cancel is on its way out.
        if isinstance(translated, Cancelled):
            translated = Unavailable(f"the tokenizer hung up: {translated.message}")
        if isinstance(translated, Unavailable) and not before_first:
            translated = WorkerLost(f"the tokenizer was lost: {translated.message}")
        raise translated from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The channel was closed under the call: it is that which was cancelled, not who reads it.
        raise WorkerLost("the tokenizer left before the request was finished") from None
    if message is grpc.aio.EOF:
        return None
    return cast(tokenizer_pb2.TextDelta, message)


def _raise_refusal(first: Update) -> None:
    for choice in first.choices:
        if choice.finish is not None and choice.finish.error is not None:
            raise choice.finish.error
