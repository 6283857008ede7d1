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

    def __init__(self, call: GenerateCall, first: Update, *, n: int) -> None:
        """
        Args:
            call: The gRPC stream; its first message has been read.
            first: That message.
            n: Number of choices that must each end once.
        """
        self.first = first
        self._call = call
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
        update = await _read(self._call)
        if update is None:
            raise WorkerLost("the tokenizer ended the stream before the request was finished")
        self._check(update)
        return update

    async def _see_off(self) -> None:
        """Take in the clean end of the stream, so that ``cancel`` finds nothing to cancel."""
        with contextlib.suppress(SluicewayError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await _read(self._call)

    def cancel(self) -> None:
        """End the stream; the tokenizer aborts what is still running."""
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

    async def run(self) -> None:
        """Keep a connection and an Info stream to each address, until cancelled."""
        try:
            await self._keep_linked()
        finally:
            for peer in self._peers.values():
                await peer.channel.close()

    async def _keep_linked(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for addresses in self._endpoints.watch():
                for address in self._peers.keys() - addresses:
                    retired = self._peers.pop(address)
                    retired.follower.cancel()
                    group.create_task(retired.channel.close(CLOSE_GRACE_S))
                for address in sorted(addresses - self._peers.keys()):
                    channel = connect(address, cluster_token=self._token)
                    follower = group.create_task(self._follow(address, channel))
                    self._peers[address] = _Peer(channel, follower)

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
        stub = tokenizer_pb2_grpc.TokenizerStub(self._peers[address].channel)
        with bind_request(request_id=request.request_id):  # the call carries it
            call: GenerateCall = stub.Generate(request_to_message(request, attempt=attempt))
        try:
            first = await _read(call, before_first=True)
            if first is None:
                raise WorkerLost("the tokenizer ended the stream before it admitted the request")
            _raise_refusal(first)
            return Generation(call, first, n=request.n)
        except BaseException:
            call.cancel()
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
        return tokenizer_pb2_grpc.TokenizerStub(self._peers[address].channel)

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
    """One tokenizer: its connection and the task that follows its Info stream."""

    def __init__(self, channel: grpc.aio.Channel, follower: asyncio.Task[None]) -> None:
        self.channel = channel
        self.follower = follower


async def _answer_of(call: Awaitable[R]) -> R:
    """The reply of a unary call, or our error."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None


async def _read(call: GenerateCall, *, before_first: bool = False) -> Update | None:
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
    if message is grpc.aio.EOF:
        return None
    return update_from_message(cast(tokenizer_pb2.TextDelta, message))


def _raise_refusal(first: Update) -> None:
    for choice in first.choices:
        if choice.finish is not None and choice.finish.error is not None:
            raise choice.finish.error
