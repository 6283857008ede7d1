"""Notices that a client has gone, or that the gateway stops, while its request is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def until_gone(
    work: Awaitable[T], *watchers: Coroutine[Any, Any, None], receive: Receive
) -> T:
    """Do the work unless the client goes first.

    Args:
        work: Cancelled if anything else happens first.
        watchers: Raise when the work has to end early.
        receive: ASGI; the body must have been read.

    Raises:
        ClientGone: The connection was closed.
        BaseException: What ``work`` or a watcher raised.
    """
    return await unless(work, _watch(receive), *watchers)


async def unless(work: Awaitable[T], *watchers: Coroutine[Any, Any, None]) -> T:
    """Do the work unless a watcher raises first.

    Args:
        work: Cancelled if anything else happens first.
        watchers: Raise when the work has to end early; cancelled once it is done.

    Raises:
        BaseException: What ``work`` or a watcher raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(watcher) for watcher in watchers]
            result = await work
            for task in watching:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    return result


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


def first_of(errors: BaseException) -> BaseException:
    """The first error of a group, however deep; an error that is no group is its own first."""
    error = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
