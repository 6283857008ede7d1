"""One HTTP request that uses a tokenizer: a place inside, the body, an answer or an error.

What is between body and answer is the subclass's. Until the headers an error is a plain HTTP error;
after them it is the last line of the stream.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
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
from services.gateway.disconnect import ClientGone, unless, until_gone
from services.gateway.http_errors import error_event, error_response, unexpected
from services.gateway.key_limits import KeyLimits
from services.gateway.metrics import GatewayMetrics
from services.gateway.sse import SEND_BODY, EventStream
from services.gateway.tokenizer_client import TokenizerClient

log = get_logger(__name__)
JsonObject = dict[str, Any]


class ExchangeContext:
    """What every exchange uses."""

    def __init__(
        self,
        *,
        client: TokenizerClient,
        admission: Admission,
        key_limits: KeyLimits,
        metrics: GatewayMetrics,
        max_body_bytes: int,
    ) -> None:
        """
        Args:
            client: Link to the tokenizers.
            admission: The door.
            key_limits: What each API key may use.
            metrics: Where requests are recorded.
            max_body_bytes: Largest body that is taken.
        """
        self.client = client
        self.admission = admission
        self.key_limits = key_limits
        self.metrics = metrics
        self.max_body_bytes = max_body_bytes


class Exchange(Response):
    """The reply to one request; all the work is done while it is sent.

    Attributes:
        held: The places that the request takes; whoever goes on after the reply takes them over.
    """

    def __init__(self, context: ExchangeContext) -> None:
        """
        Args:
            context: What it uses.
        """
        super().__init__()
        self.context = context
        self.held = ExitStack()

    @abstractmethod
    async def answer(self, body: JsonObject, scope: Scope, stream: EventStream) -> None:
        """Answer the request through ``stream``.

        Cancelled if the client goes, or if the gateway cannot wait for it any longer.

        Raises:
            SluicewayError: What is to be told instead, alone or in groups.
        """

    def error_event(self, error: SluicewayError) -> bytes:
        """What ends a stream that fails."""
        return error_event(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: answer the request, whatever happens."""
        stream = EventStream(send, send_body=scope.get(SEND_BODY))
        try:
            with self.held as held:
                held.enter_context(self.context.admission.slot())
                held.enter_context(self.context.key_limits.slot(scope.get("tenant", "")))
                await self._answer(scope, receive, stream)
        except ClientGone:
            log.info("client_gone", path=scope["path"])
        except SluicewayError as error:
            await self._fail(error, scope, receive, stream)
        except Exception as error:
            await self._fail(unexpected(error), scope, receive, stream)

    async def _answer(self, scope: Scope, receive: Receive, stream: EventStream) -> None:
        cut_off = self.context.admission.wait_cut_off
        max_bytes = self.context.max_body_bytes
        headers = Headers(scope=scope)
        raw = await unless(read_body(receive, headers=headers, max_bytes=max_bytes), cut_off())
        work = self.answer(parse_object(raw), scope, stream)
        await until_gone(work, cut_off(), receive=receive)

    async def _fail(
        self, error: SluicewayError, scope: Scope, receive: Receive, stream: EventStream
    ) -> None:
        log.info("request_failed", error=type(error).__name__, message=error.message)
        if stream.has_started:
            await stream.end(self.error_event(error))
        else:
            reply = error_response(error, path=scope["path"])
            await reply(scope, receive, stream.send)


class JsonExchange(Exchange):
    """An exchange whose answer is made by one function of the body."""

    def __init__(
        self, work: Callable[[JsonObject], Awaitable[JsonObject]], context: ExchangeContext
    ) -> None:
        """
        Args:
            work: Makes the reply of the body.
            context: What it uses.
        """
        super().__init__(context)
        self._work = work

    async def answer(self, body: JsonObject, scope: Scope, stream: EventStream) -> None:
        """See ``Exchange``."""
        await send_json(await self._work(body), stream.send)


async def send_json(body: JsonObject, send: Send) -> None:
    """Send a whole reply."""
    payload = orjson.dumps(body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(payload)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
