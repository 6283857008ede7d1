"""What the requests at one tokenizer gain, from one stream, handed to the inbox of each.

A request's own stream brings its first message, and then only says how it ends.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import Callable

import grpc

from services.common.errors import SluicewayError, WorkerLost
from services.common.pb import tokenizer_pb2, tokenizer_pb2_grpc
from services.common.rpc import translate
from services.common.telemetry import get_logger

log = get_logger(__name__)


class Inbox:
    """One request's; ``next`` gives what has come, in order. To be closed.

    Attributes:
        call: What the feed calls the request.
        close: What still comes for it is dropped.
    """

    def __init__(self, call: int, *, close: Callable[[], object]) -> None:
        self.call = call
        self.close = close
        self._messages: deque[tokenizer_pb2.TextDelta] = deque()
        self._error: SluicewayError | None = None
        self._news = asyncio.Event()

    def put(self, message: tokenizer_pb2.TextDelta) -> None:
        """Something has come."""
        self._messages.append(message)
        self._news.set()

    def fail(self, error: SluicewayError) -> None:
        """Nothing will come any more; the first call decides why."""
        self._error = self._error or error
        self._news.set()

    async def next(self) -> tokenizer_pb2.TextDelta:
        """The next message.

        Raises:
            SluicewayError: All that came has been given, and ``fail`` was called.
        """
        while not self._messages:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._messages.popleft()


class Feed:
    """One connection's. Call ``read`` once for each stream; it opens and closes the feed.

    Attributes:
        id: What requests name it by; "" while it is closed.
    """

    def __init__(self, address: str) -> None:
        """
        Args:
            address: The tokenizer's, for the log.
        """
        self.id = ""
        self._address = address
        self._calls = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}

    def open_inbox(self) -> Inbox:
        """An inbox for a request that names this feed; it must be open."""
        call = next(self._calls)
        inbox = Inbox(call, close=lambda: self._inboxes.pop(call, None))
        self._inboxes[call] = inbox
        return inbox

    async def read(self, stub: tokenizer_pb2_grpc.TokenizerAsyncStub) -> bool:
        """Open the feed and hand out what it brings, until the stream ends.

        Returns:
            Whether the tokenizer has feeds at all.
        """
        feed_id = uuid.uuid4().hex
        call = stub.Feed(tokenizer_pb2.FeedRequest(feed_id=feed_id), wait_for_ready=True)
        why, was_open = "it ended the feed", False
        try:
            async for frame in call:
                self.id, was_open = feed_id, True
                for number, delta in zip(frame.call, frame.delta, strict=True):
                    inbox = self._inboxes.get(number)
                    if inbox is not None:
                        inbox.put(delta)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                log.info("tokenizer_has_no_feeds", address=self._address)
                return False
            why = translate(error).message
            if not was_open:  # a tokenizer that drains refuses every further one: not news
                log.debug("tokenizer_feed_refused", address=self._address, error=why)
        except ValueError as error:  # columns of different lengths
            why = f"a frame makes no sense: {error}"
        finally:
            self.id = ""
            call.cancel()
            if was_open:
                log.warning("tokenizer_feed_lost", address=self._address, error=why)
            for inbox in self._inboxes.values():
                inbox.fail(WorkerLost(f"the tokenizer was lost: {why}"))
            self._inboxes.clear()
        return True
