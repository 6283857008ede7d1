"""A tokenizer that answers from a script, over real gRPC.

What it says is deterministic; it can be slow, refuse, break off in the middle or die, as the script
says. Its "tokens" are pieces of text with ids of its own making: ``encode`` and ``decode`` are each
other's inverse.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import orjson

from services.common.errors import SluicewayError
from services.common.pb import common_pb2 as pb
from services.common.pb import tokenizer_pb2, tokenizer_pb2_grpc
from services.common.rpc import RpcServer

MODEL = "fake"
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 256
_PIECES = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True)
class Script:
    """How one generation goes.

    Attributes:
        tokens: What choice 0 says; choice i says "i:" before it.
        reason: How a choice ends when its tokens do; max_tokens ends it with length before.
        stop: Stop string or token id that is named as what ended it.
        pace_s: Between two deltas.
        tokens_per_delta: Tokens that each delta carries.
        refusal: Raised instead of the first delta.
        refused_finish: The first delta is a finish with this error.
        breaks_after: After so many deltas the stream ends: with ``break_error``, or just so.
        break_error: See there.
        failure: The finish of choice 0 is this error.
        gate: Waited for between admission and the first token.
        cached_tokens: As told in usage.
        logprob: Of every token.
        skips_token: The second delta's offset is wrong.
        gives_vectors: Whether requests that pool get theirs.
    """

    tokens: Sequence[str | bytes] = ("Hello", ",", " world", "!")
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP
    stop: str | int | None = None
    pace_s: float = 0.0
    tokens_per_delta: int = 1
    refusal: SluicewayError | None = None
    refused_finish: SluicewayError | None = None
    breaks_after: int | None = None
    break_error: SluicewayError | None = None
    failure: SluicewayError | None = None
    gate: asyncio.Event | None = None
    cached_tokens: int = 0
    logprob: float = -0.5
    skips_token: bool = False
    gives_vectors: bool = True


@dataclass
class Vocabulary:
    """Pieces of text and their ids, in order of appearance."""

    pieces: list[bytes] = field(default_factory=lambda: [b"<pad>"])

    def id_of(self, piece: bytes) -> int:
        """The id of a piece; new ones get the next."""
        if piece not in self.pieces:
            self.pieces.append(piece)
        return self.pieces.index(piece)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return [self.id_of(piece.encode()) for piece in _PIECES.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of a token; an unknown one is written as its number."""
        is_known = token_id < len(self.pieces)
        return self.pieces[token_id] if is_known else f"<{token_id}>".encode()


def ready_info(**changes: object) -> tokenizer_pb2.ServiceInfo:
    """What a tokenizer with one ready engine says."""
    engine = pb.EngineState(
        engine_id=7,
        worker_id="worker-a",
        phase=pb.ENGINE_PHASE_READY,
        info=pb.WorkerInfo(num_blocks=100, kv_groups=[pb.KvGroup(block_size=16, kind="full")]),
        load=pb.Load(
            running=2,
            waiting=3,
            preemptions=4,
            generated_tokens=50,
            prompt_tokens=60,
            prefix_queries=70,
            prefix_hits=35,
            finished_stop=8,
            finished_length=9,
            finished_abort=10,
            finished_error=11,
            kv_blocks_used=25,
            kv_blocks_total=100,
        ),
    )
    info = tokenizer_pb2.ServiceInfo(
        model=MODEL,
        engines=[engine],
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        ready=True,
    )
    info.MergeFrom(tokenizer_pb2.ServiceInfo(**changes))  # type: ignore[arg-type]
    return info


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """Answers every Generate with ``script``; see there.

    Attributes:
        script: For the generations to come.
        requests: Every GenerateRequest, in order.
        num_running: Generations that have neither ended nor been cancelled.
        num_cancelled: Generations that the client gave up.
        vocabulary: Its tokens.
        info: What it says on Info streams; see ``set_info``.
        feeds: Open ones, by id: what waits to be written.
    """

    def __init__(self, script: Script | None = None, *, has_feeds: bool = True) -> None:
        self.script = script or Script()
        self.feeds: dict[str, asyncio.Queue[tokenizer_pb2.FeedFrame]] = {}
        self._has_feeds = has_feeds
        self.requests: list[tokenizer_pb2.GenerateRequest] = []
        self.num_running = 0
        self.num_cancelled = 0
        self.num_deltas = 0
        self.vocabulary = Vocabulary()
        self.address = ""
        self.server: RpcServer | None = None
        self.info = ready_info()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def serving(self, *, port: int = 0) -> AsyncIterator[FakeTokenizer]:
        """Listen on loopback; ``address`` says where."""
        self.server = RpcServer(host="127.0.0.1", port=port, cluster_token=None)
        self.server.add(
            tokenizer_pb2_grpc.add_TokenizerServicer_to_server, self, "sluiceway.v1.Tokenizer"
        )
        self.address = await self.server.start()
        try:
            yield self
        finally:
            await self.server.stop(grace_s=0)

    async def die(self) -> None:
        """Drop every connection and listen no more."""
        assert self.server is not None
        await self.server.stop(grace_s=0)

    async def wait_idle(self) -> None:
        """Return once no generation runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running == 0)

    async def wait_for_requests(self, count: int) -> None:
        """Return once ``count`` requests have come."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= count)

    async def wait_for_deltas(self, count: int) -> None:
        """Return once ``count`` deltas were sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_deltas >= count)

    async def set_info(self, info: tokenizer_pb2.ServiceInfo) -> None:
        """Say something else on every Info stream."""
        self.info = info
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def Info(
        self, request: tokenizer_pb2.InfoRequest, context: object
    ) -> AsyncIterator[tokenizer_pb2.ServiceInfo]:
        """The present state, then every change."""
        while True:
            said = self.info
            yield said
            async with self._changed:
                await self._changed.wait_for(lambda said=said: self.info is not said)

    async def Generate(
        self, request: tokenizer_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[tokenizer_pb2.TextDelta]:
        """Play the script."""
        self.requests.append(request)
        self.num_running += 1
        await self._notify()
        try:
            is_first = True
            async for delta in self._play(request, self.script):
                self.num_deltas += 1
                if is_first or not request.feed_id:
                    yield delta
                else:
                    frame = tokenizer_pb2.FeedFrame(call=[request.feed_call], delta=[delta])
                    self.feeds[request.feed_id].put_nowait(frame)
                is_first = False
                await self._notify()
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
            await self._notify()

    async def Feed(
        self, request: tokenizer_pb2.FeedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[tokenizer_pb2.FeedFrame]:
        """What the generations that name it gain after their first delta."""
        if not self._has_feeds:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older tokenizer")
        feed = self.feeds[request.feed_id] = asyncio.Queue()
        yield tokenizer_pb2.FeedFrame()
        while True:
            yield await feed.get()

    async def _play(
        self, request: tokenizer_pb2.GenerateRequest, script: Script
    ) -> AsyncIterator[tokenizer_pb2.TextDelta]:
        if script.refusal is not None:
            raise script.refusal
        performance = Performance(self.vocabulary, request, script)
        yield performance.admission()
        if script.refused_finish is not None:
            return
        if script.gate is not None:
            await script.gate.wait()
        if request.pooling:
            yield performance.vector()
            return
        for number, delta in enumerate(performance.deltas(), start=1):
            yield delta
            if number == script.breaks_after:
                if script.break_error is not None:
                    raise script.break_error
                return
            await asyncio.sleep(script.pace_s)

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: object
    ) -> tokenizer_pb2.TokenizeReply:
        """Ids of a text."""
        ids = self.vocabulary.encode(request.text)
        tokens = [self.vocabulary.decode([i]) for i in ids]
        return tokenizer_pb2.TokenizeReply(ids=ids, tokens=tokens, max_model_len=MAX_MODEL_LEN)

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: object
    ) -> tokenizer_pb2.DetokenizeReply:
        """Text of ids."""
        return tokenizer_pb2.DetokenizeReply(text=self.vocabulary.decode(request.ids))

    async def ResetCache(
        self, request: pb.ResetCacheRequest, context: object
    ) -> pb.ResetCacheReply:
        """Two engines; one of them is busy while a generation runs."""
        num_busy = min(self.num_running, 1)
        return pb.ResetCacheReply(engines_reset=2 - num_busy, engines_busy=num_busy)

    async def Render(
        self, request: tokenizer_pb2.RenderRequest, context: object
    ) -> tokenizer_pb2.RenderReply:
        """A conversation as text and ids."""
        text = _render(request.chat)
        return tokenizer_pb2.RenderReply(text=text, ids=self.vocabulary.encode(text))


def _render(chat: tokenizer_pb2.ChatPrompt) -> str:
    messages = orjson.loads(chat.messages_json)
    return " ".join(f"{message['role']}: {message.get('content')}" for message in messages)


class Performance:
    """One generation: makes its messages."""

    def __init__(
        self, vocabulary: Vocabulary, request: tokenizer_pb2.GenerateRequest, script: Script
    ) -> None:
        self._vocabulary = vocabulary
        self._request = request
        self._script = script
        self._prompt_ids = self._encode_prompt()
        self._choices = [self._tokens_of(index) for index in range(request.n)]

    def _encode_prompt(self) -> list[int]:
        kind = self._request.WhichOneof("prompt")
        if kind == "ids":
            return list(self._request.ids.ids)
        text = self._request.text if kind == "text" else _render(self._request.chat)
        return self._vocabulary.encode(text)

    def _tokens_of(self, index: int) -> list[bytes]:
        said = [t.encode() if isinstance(t, str) else t for t in self._script.tokens]
        tokens = said if index == 0 else [f"{index}:".encode(), *said]
        sampling = self._request.sampling
        return tokens[: sampling.max_tokens] if sampling.HasField("max_tokens") else tokens

    def admission(self) -> tokenizer_pb2.TextDelta:
        """The first delta: the prompt, and its log-probabilities if asked for; or the refusal."""
        if self._script.refused_finish is not None:
            return self._refusal(self._script.refused_finish)
        delta = tokenizer_pb2.TextDelta(has_prompt=True, prompt_ids=self._prompt_ids)
        if self._request.sampling.HasField("prompt_logprobs"):
            self._add_prompt_logprobs(delta, self._request.sampling.prompt_logprobs)
        return delta

    def _add_prompt_logprobs(self, delta: tokenizer_pb2.TextDelta, num_top: int) -> None:
        columns = delta.prompt_logprobs
        columns.start = 1
        for token_id in self._prompt_ids[1:]:
            piece = self._vocabulary.bytes_of(token_id)
            columns.token_ids.append(token_id)
            columns.logprob.append(self._script.logprob)
            columns.rank.append(1)
            delta.prompt_token_bytes.append(piece)
            delta.prompt_top_token_bytes.extend(self._add_top(columns, token_id, piece, num_top))
        columns.SetInParent()

    def _add_top(
        self, columns: pb.Logprobs | pb.PromptLogprobs, token_id: int, piece: bytes, num_top: int
    ) -> list[bytes]:
        """The taken token, then "alt1", "alt2" ..., each less likely by 1."""
        pieces = [piece, *(f"alt{i}".encode() for i in range(1, num_top))][:num_top]
        columns.num_top.append(num_top)
        columns.top_ids.extend([token_id, *range(901, 900 + num_top)][:num_top])
        columns.top_logprobs.extend(self._script.logprob - i for i in range(num_top))
        return pieces

    def _refusal(self, error: SluicewayError) -> tokenizer_pb2.TextDelta:
        finish = tokenizer_pb2.Finish(reason=pb.FINISH_REASON_ERROR, error=_detail(error))
        return tokenizer_pb2.TextDelta(choices=[tokenizer_pb2.ChoiceDelta(index=0, finish=finish)])

    def vector(self) -> tokenizer_pb2.TextDelta:
        """The end of a request that pools: its vector is (sum of the prompt's ids, 3, 4)."""
        finish = self._finish(0)
        if not finish.HasField("error"):
            finish.reason = pb.FINISH_REASON_STOP
            finish.usage.output_tokens = 0
            if self._script.gives_vectors:
                finish.pooled = struct.pack("<3f", sum(self._prompt_ids), 3.0, 4.0)
        return tokenizer_pb2.TextDelta(choices=[tokenizer_pb2.ChoiceDelta(index=0, finish=finish)])

    def deltas(self) -> list[tokenizer_pb2.TextDelta]:
        """Deltas with tokens of every choice that still has some."""
        step = self._script.tokens_per_delta
        longest = max(len(tokens) for tokens in self._choices)
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._choices]
        num_chars = [0] * len(self._choices)
        made = []
        for start in range(0, max(longest, 1), step):
            delta = tokenizer_pb2.TextDelta()
            for index, tokens in enumerate(self._choices):
                if start >= max(len(tokens), 1):
                    continue
                choice = self._choice(index, start, tokens[start : start + step])
                is_last = start + step >= len(tokens)
                raw = b"".join(tokens[start : start + step])
                choice.text = decoders[index].decode(raw, final=is_last)
                choice.num_chars = num_chars[index]
                num_chars[index] += len(choice.text)
                if is_last:
                    choice.finish.CopyFrom(self._finish(index))
                delta.choices.append(choice)
            made.append(delta)
        return made

    def _choice(self, index: int, start: int, tokens: Sequence[bytes]) -> tokenizer_pb2.ChoiceDelta:
        choice = tokenizer_pb2.ChoiceDelta(index=index, num_tokens=start)
        if self._script.skips_token and start > 0:
            choice.num_tokens += 1
        sampling = self._request.sampling
        for position, piece in enumerate(tokens):
            token_id = self._vocabulary.id_of(piece)
            choice.token_ids.append(token_id)
            if sampling.HasField("logprobs"):
                columns = choice.logprobs
                columns.position.append(position)
                columns.logprob.append(self._script.logprob)
                columns.rank.append(1)
                choice.logprob_token_bytes.append(piece)
                tops = self._add_top(columns, token_id, piece, sampling.logprobs)
                choice.top_token_bytes.extend(tops)
        return choice

    def _finish(self, index: int) -> tokenizer_pb2.Finish:
        script = self._script
        num_tokens = len(self._choices[index])
        if script.failure is not None and index == 0:
            return tokenizer_pb2.Finish(
                reason=pb.FINISH_REASON_ERROR, error=_detail(script.failure)
            )
        is_cut = num_tokens == self._request.sampling.max_tokens
        finish = tokenizer_pb2.Finish(
            reason=pb.FINISH_REASON_LENGTH if is_cut else script.reason,
            usage=pb.Usage(
                prompt_tokens=len(self._prompt_ids),
                cached_tokens=script.cached_tokens,
                computed_tokens=len(self._prompt_ids) - script.cached_tokens,
                output_tokens=num_tokens,
            ),
            life=_life(num_tokens),
        )
        if isinstance(script.stop, str):
            finish.stop_string = script.stop
        elif script.stop is not None:
            finish.stop_token_id = script.stop
        return finish


def _life(num_tokens: int) -> pb.Life:
    """Queued 1 s, prefilled 2 s, then 1 s per further token."""
    second = 10**9
    start = 1_700_000_000 * second
    return pb.Life(
        arrival_unix_ns=start,
        scheduled_unix_ns=start + second,
        first_token_unix_ns=start + 3 * second,
        last_token_unix_ns=start + (2 + num_tokens) * second,
        decision=pb.DecisionRecord(chosen_engine_id=7),
    )


def _detail(error: SluicewayError) -> pb.ErrorDetail:
    return pb.ErrorDetail(
        error_class=type(error).__name__,
        message=error.message,
        param=error.param or "",
        retry_after_ms=int((error.retry_after_s or 0) * 1000),
    )
