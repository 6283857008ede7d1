"""The Tokenizer service: text in, text out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeVar

import grpc

from services.common.errors import InvalidRequest, ModelNotFound, Unavailable
from services.common.lifecycle import Lifecycle
from services.common.pb import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer import metrics
from services.tokenizer.convert import (
    chat_from_message,
    delta_to_message,
    engine_from_message,
    request_from_message,
)
from services.tokenizer.encode import Encoder
from services.tokenizer.feed import Feed, Place
from services.tokenizer.generate import Generator
from services.tokenizer.kvstore_client import KvStoreClient
from services.tokenizer.prompt import PromptReader
from services.tokenizer.routing import Engine, Router, usable
from services.tokenizer.scheduler_client import SIDE_CALL_TIMEOUT_S, SchedulerClient
from services.tokenizer.session import Session

INFO_PERIOD_S = 0.5
Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")


class TokenizerService(tokenizer_pb2_grpc.TokenizerServicer):
    """See ``proto/tokenizer.proto``."""

    def __init__(
        self,
        *,
        model: str,
        text_fp: str,
        encoder: Encoder,
        prompts: PromptReader,
        schedulers: SchedulerClient,
        kvstore: KvStoreClient,
        life: Lifecycle,
        max_choices: int,
    ) -> None:
        """
        Args:
            model: The name that requests must use.
            text_fp: Fingerprint of tokenizer and template.
            encoder: The model's tokenizer.
            prompts: Makes token ids of prompts.
            schedulers: Running.
            kvstore: Running.
            life: Once it is stopping, nothing new is taken.
            max_choices: Most choices that one request may ask for.
        """
        self._model = model
        self._text_fp = text_fp
        self._encoder = encoder
        self._prompts = prompts
        self._schedulers = schedulers
        self._kvstore = kvstore
        self._life = life
        self._num_running = 0
        self._feeds: dict[str, Feed] = {}
        self._ran_out = asyncio.Event()
        self._generator = Generator(
            encoder=encoder,
            prompts=prompts,
            router=Router(kvstore, model=model, text_fp=text_fp),
            engines=self._engines,
            session_with=self._session_with,
            text_fp=text_fp,
            max_choices=max_choices,
        )

    async def Generate(
        self, request: tokenizer_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[tokenizer_pb2.TextDelta]:
        """Text deltas of one request, the first of them once it is admitted."""
        self._require_model(request.model)
        self._require_running()
        wanted = request_from_message(request)
        token_bytes = self._encoder.token_bytes.shown
        self._num_running += 1
        try:
            with metrics.counted_request(), self._place(request) as place:
                async with aclosing(self._generator.deltas(wanted, place=place)) as deltas:
                    async for delta in deltas:
                        yield delta_to_message(delta, tokenizer_pb2.TextDelta(), token_bytes)
        finally:
            self._num_running -= 1
            self._ran_out.set()

    async def Feed(
        self, request: tokenizer_pb2.FeedRequest, context: Context
    ) -> AsyncIterator[tokenizer_pb2.FeedFrame]:
        """What the requests that name this feed gain after their first delta."""
        self._require_running()
        if not request.feed_id or request.feed_id in self._feeds:
            raise InvalidRequest(
                f"feed_id must be new and not empty, got {request.feed_id!r}", param="feed_id"
            )
        feed = self._feeds[request.feed_id] = Feed(self._encoder.token_bytes.shown)
        try:
            async with aclosing(feed.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            del self._feeds[request.feed_id]
            feed.close()

    async def Render(
        self, request: tokenizer_pb2.RenderRequest, context: Context
    ) -> tokenizer_pb2.RenderReply:
        """A chat as the model will see it."""
        self._require_model(request.model)
        text, ids = await self._prompts.render(chat_from_message(request.chat))
        return tokenizer_pb2.RenderReply(text=text, ids=ids)

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeReply:
        """Token ids of a text."""
        self._require_model(request.model)
        add_special_tokens = (
            request.add_special_tokens if request.HasField("add_special_tokens") else True
        )
        ids = await self._encoder.encode(
            request.text, add_special_tokens=add_special_tokens, param="prompt"
        )
        return tokenizer_pb2.TokenizeReply(
            ids=ids, tokens=self._encoder.tokens(ids), max_model_len=self._max_model_len()
        )

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeReply:
        """Text of token ids."""
        self._require_model(request.model)
        ids = list(request.ids)
        self._encoder.require_known(ids, param="tokens")
        text = await self._encoder.in_thread(
            lambda: self._encoder.decode(ids, skip_special_tokens=request.skip_special_tokens)
        )
        return tokenizer_pb2.DetokenizeReply(text=text)

    async def Info(
        self, request: tokenizer_pb2.InfoRequest, context: Context
    ) -> AsyncIterator[tokenizer_pb2.ServiceInfo]:
        """The state of the service at once, on every change, and regularly for the loads in it."""
        while not self._life.stopping.is_set():
            yield self.info()
            await self._schedulers.changed.wait(timeout_s=INFO_PERIOD_S)

    async def Explain(
        self, request: common_pb2.ExplainRequest, context: Context
    ) -> common_pb2.ExplainReply:
        """What became of a request, from whichever scheduler knows it."""
        replies = await self._schedulers.ask_each(
            lambda stub: stub.Explain(request, timeout=SIDE_CALL_TIMEOUT_S)
        )
        return next((reply for reply in replies if reply.found), common_pb2.ExplainReply())

    async def ResetCache(
        self, request: common_pb2.ResetCacheRequest, context: Context
    ) -> common_pb2.ResetCacheReply:
        """Have every engine forget its prefix cache."""
        replies = await self._schedulers.ask_each(
            lambda stub: stub.ResetCache(request, timeout=SIDE_CALL_TIMEOUT_S)
        )
        return common_pb2.ResetCacheReply(
            engines_reset=sum(reply.engines_reset for reply in replies),
            engines_busy=sum(reply.engines_busy for reply in replies),
        )

    async def Drain(
        self, request: common_pb2.DrainRequest, context: Context
    ) -> common_pb2.DrainReply:
        """Have engines finish what they have and take nothing new."""
        replies = await self._schedulers.ask_each(
            lambda stub: stub.Drain(request, timeout=SIDE_CALL_TIMEOUT_S)
        )
        return common_pb2.DrainReply(
            engines_draining=sum(reply.engines_draining for reply in replies)
        )

    async def run_out(self, *, timeout_s: float) -> None:
        """Once nothing new is taken: wait until no ``Generate`` runs, at most so long."""
        for feed in self._feeds.values():
            feed.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_running:
                    self._ran_out.clear()
                    await self._ran_out.wait()

    def info(self) -> tokenizer_pb2.ServiceInfo:
        """The state of the service now."""
        reason = self.not_ready_reason()
        info = tokenizer_pb2.ServiceInfo(
            model=self._model,
            text_fp=self._text_fp,
            max_model_len=self._max_model_len(),
            vocab_size=self._encoder.vocab_size,
            ready=not reason,
            not_ready_reason=reason,
            kvstore_degraded=self._kvstore.is_degraded,
        )
        for session in self._schedulers.sessions:
            for engine in session.engines:
                info.engines.add().CopyFrom(engine)
                info.engines[-1].scheduler_address = session.address
        return info

    def not_ready_reason(self) -> str:
        """Why a request would be refused now; "" if it would be taken."""
        if self._life.stopping.is_set():
            return "this tokenizer is shutting down"
        try:
            usable(self._engines(), text_fp=self._text_fp)
        except Unavailable as error:
            return error.message
        return ""

    def _place(
        self, request: tokenizer_pb2.GenerateRequest
    ) -> AbstractContextManager[Place | None]:
        if not request.feed_id:
            return contextlib.nullcontext()
        feed = self._feeds.get(request.feed_id)
        if feed is None:
            raise Unavailable(f"there is no open feed {request.feed_id!r}", retry_after_s=1.0)
        return feed.place(request.feed_call)

    def _engines(self) -> list[Engine]:
        return [
            engine_from_message(state, scheduler=session.address)
            for session in self._schedulers.sessions
            for state in session.engines
        ]

    def _session_with(self, address: str) -> Session | None:
        sessions = self._schedulers.sessions
        return next((session for session in sessions if session.address == address), None)

    def _max_model_len(self) -> int:
        """The smallest limit of the usable engines; 0 = there are none."""
        if self.not_ready_reason():
            return 0
        engines = usable(self._engines(), text_fp=self._text_fp)
        return min(engine.max_model_len for engine in engines)

    def _require_running(self) -> None:
        if self._life.stopping.is_set():
            raise Unavailable("this tokenizer is shutting down", retry_after_s=1.0)

    def _require_model(self, model: str) -> None:
        if model and model != self._model:
            raise ModelNotFound(
                f"the model {model!r} does not exist; this server has {self._model!r}",
                param="model",
            )
