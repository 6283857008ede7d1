"""What many requests of one client gain, in one stream.

A gRPC message costs about the same whatever it holds, and the loop a wake-up for each stream that
has one; with sixty streams these are most of what a token costs. Nothing waits here for company: a
frame is written as soon as there is news, and takes what there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from services.common.errors import InvalidRequest, Unavailable
from services.common.pb import tokenizer_pb2
from services.tokenizer.convert import delta_to_message
from services.tokenizer.generation import Delta, Generation


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
        self._news = asyncio.Event()
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
            self._news.set()  # it may have been the last

    async def frames(self) -> AsyncGenerator[tokenizer_pb2.FeedFrame]:
        """Frames to write, until the feed is drained and no request has a place."""
        yield tokenizer_pb2.FeedFrame()
        while self._places or not self._is_draining:
            await self._news.wait()
            self._news.clear()
            if self._with_news:
                yield self._frame()

    def drain(self) -> None:
        """End once no request has a place any more."""
        self._is_draining = True
        self._news.set()

    def close(self) -> None:
        """The client is gone: give up what has a place."""
        self._is_closed = True
        for place in self._places.values():
            place.fail(_closed())

    def _has_news(self, call: int) -> None:
        place = self._places.get(call)
        if place is not None:  # a request that was given up still hears of its end
            self._with_news[call] = place
            self._news.set()

    def _frame(self) -> tokenizer_pb2.FeedFrame:
        frame = tokenizer_pb2.FeedFrame(call=self._with_news)
        for place in self._with_news.values():
            delta_to_message(place.take(), frame.delta.add(), self._token_bytes)
        self._with_news.clear()
        return frame


class Place:
    """One request's in a feed."""

    def __init__(self, has_news: Callable[[], None]) -> None:
        self._has_news = has_news
        self._carried: _Carried | None = None
        self._error: Exception | None = None

    async def carry(self, generation: Generation, *, on_delta: Callable[[Delta], None]) -> None:
        """Give out the rest of a generation; returns once its end is in a frame.

        Args:
            generation: It has been admitted.
            on_delta: Told of everything that is given out.

        Raises:
            Unavailable: The feed was closed.
        """
        if self._error is not None:
            raise self._error
        if generation.has_ended:
            return
        ended = asyncio.get_running_loop().create_future()
        self._carried = _Carried(generation, on_delta, ended)
        generation.listen(self._has_news)
        await ended

    def take(self) -> Delta:
        """What is new; there is something."""
        assert self._carried is not None
        generation, on_delta, ended = self._carried
        delta = generation.take()
        on_delta(delta)
        if generation.has_ended and not ended.done():
            ended.set_result(None)
        return delta

    def fail(self, error: Exception) -> None:
        """Give up."""
        self._error = error
        if self._carried is not None and not self._carried.ended.done():
            self._carried.ended.set_exception(error)


class _Carried(NamedTuple):
    generation: Generation
    on_delta: Callable[[Delta], None]
    ended: asyncio.Future[None]


def _closed() -> Unavailable:
    return Unavailable("the feed of this request is not open", retry_after_s=1.0)
