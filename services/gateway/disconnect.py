"""Notices that a client has gone, or that the gateway stops, while its request is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def until_gone(
    work: Awaitable[T],
    *,
    receive: Receive,
    cut_off: Callable[[], Coroutine[Any, Any, None]],
) -> T:
    """Do the work unless the client goes first.

    Args:
        work: Cancelled if anything else happens first.
        receive: ASGI; the body must have been read.
        cut_off: Raises when the work has to end early.

    Raises:
        ClientGone: The connection was closed.
        BaseException: What ``work`` or ``cut_off`` raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(_watch(receive)), group.create_task(cut_off())]
            result = await work
            for watcher in watchers:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return result


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
