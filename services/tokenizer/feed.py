"""What many requests of one client gain, in one stream.

A gRPC message costs about the same whatever it holds, and the loop a wake-up for each stream that
has one; with sixty streams these are most of what a token costs. Nothing waits here for company:
news go into a frame as soon as the loop comes by, so that a step's are together. A client that lags
gets every step by itself all the same, up to a bound; past it steps merge.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from services.common.errors import InvalidRequest, Unavailable
from services.common.pb import tokenizer_pb2
from services.tokenizer.convert import delta_to_message
from services.tokenizer.generation import Delta, Generation

MAX_FRAMES = 64


class Feed:
    """One client's: its requests have places in it, and ``frames`` gives what they gain."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """
        Args:
            token_bytes: Bytes of each token id, for log-probabilities.
        """
        self._token_bytes = token_bytes
        self._places: dict[int, Place] = {}
        self._with_news: dict[int, Place] = {}  # in the order in which news came
        self._outbox: deque[tokenizer_pb2.FeedFrame] = deque()
        self._wake = asyncio.Event()
        self._is_draining = False
        self._is_closed = False

    @contextmanager
    def place(self, call: int) -> Iterator[Place]:
        """A place for a request, for as long as the context lasts.

        Raises:
            InvalidRequest: The number is in use.
            Unavailable: The feed is closed.
        """
        if self._is_closed:
            raise _closed()
        if call in self._places:
            raise InvalidRequest(f"feed_call {call} is in use", param="feed_call")
        place = self._places[call] = Place(partial(self._has_news, call))
        try:
            yield place
        finally:
            del self._places[call]
            self._with_news.pop(call, None)
            self._wake.set()  # it may have been the last

    async def frames(self) -> AsyncGenerator[tokenizer_pb2.FeedFrame]:
        """Frames to write, until the feed is drained and no request has a place."""
        yield tokenizer_pb2.FeedFrame()
        while self._places or not self._is_draining:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                yield self._outbox.popleft()
                self._collect()

    def drain(self) -> None:
        """End once no request has a place any more."""
        self._is_draining = True
        self._wake.set()

    def close(self) -> None:
        """The client is gone: give up what has a place."""
        self._is_closed = True
        for place in self._places.values():
            place.fail(_closed())

    def _has_news(self, call: int) -> None:
        place = self._places.get(call)
        if place is None:  # a request that was given up still hears of its end
            return
        if not self._with_news:
            asyncio.get_running_loop().call_soon(self._collect)
        self._with_news[call] = place

    def _collect(self) -> None:
        """Make a frame of all news, unless so many frames wait already."""
        if not self._with_news or len(self._outbox) >= MAX_FRAMES:
            return
        frame = tokenizer_pb2.FeedFrame(call=self._with_news)
        for place in self._with_news.values():
            delta_to_message(place.take(), frame.delta.add(), self._token_bytes)
        self._with_news.clear()
        self._outbox.append(frame)
        self._wake.set()


class Place:
    """One request's in a feed."""

    def __init__(self, has_news: Callable[[], None]) -> None:
        self._has_news = has_news
        self._carried: _Carried | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None

    def carry(self, generation: Generation, *, on_delta: Callable[[Delta], None]) -> None:
        """From now on give out what a generation gains.

        Args:
            generation: It has been admitted.
            on_delta: Told of everything that is given out.
        """
        self._carried = _Carried(generation, on_delta)
        if generation.has_ended:
            self._ended.set_result(None)
        else:
            generation.listen(self._has_news)

    async def ended(self) -> None:
        """Wait until the end of the generation is in a frame.

        Raises:
            Unavailable: The feed was closed.
        """
        await asyncio.wait([self._ended])
        if self._error is not None:
            raise self._error

    def take(self) -> Delta:
        """What is new; there is something."""
        assert self._carried is not None
        generation, on_delta = self._carried
        delta = generation.take()
        on_delta(delta)
        if generation.has_ended and not self._ended.done():
            self._ended.set_result(None)
        return delta

    def fail(self, error: Exception) -> None:
        """Give up."""
        self._error = error
        self._ended.cancel()


class _Carried(NamedTuple):
    generation: Generation
    on_delta: Callable[[Delta], None]


def _closed() -> Unavailable:
    return Unavailable("the feed of this request is not open", retry_after_s=1.0)
