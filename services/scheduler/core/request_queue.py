"""Requests in order of rank, and the policies that rank them.

The third door of the scheduler: a policy decides who is served first and, read from the other end,
who is preempted first. Both the waiting queue and the running list are kept in this order, so the
request that is first overall can never be preempted in favour of another: somebody always gets on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from services.common.errors import InvariantError
from services.scheduler.core.request import Request

QueuePolicy = Callable[[Request], float]
_BY_RANK = attrgetter("rank")


def fcfs(request: Request) -> float:
    """First come, first served."""
    return request.arrival_s


def priority_with_aging(aging_s: float) -> QueuePolicy:
    """Lower priority first, ties by arrival; each level is worth ``aging_s`` of waiting.

    The order of two requests never changes while they wait, and a request that waits long enough
    goes before any newcomer: nobody starves.
    """

    def policy(request: Request) -> float:
        return request.arrival_s + request.priority * aging_s

    return policy


class RequestQueue:
    """Requests sorted by ``rank`` (unique: it ends in the handle), the first to be served first.

    A sorted list: queues are bounded by some thousand requests, where moving the tail of a list
    costs less than the bookkeeping of a heap that must forget entries from its middle.

    Attributes:
        requests: In order. To be read only.
        num_uncached_tokens: Sum over the requests.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.num_uncached_tokens = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """Put a request where its rank belongs."""
        insort(self.requests, request, key=_BY_RANK)
        self.num_uncached_tokens += request.num_uncached_tokens

    def remove(self, request: Request) -> None:
        """Take a request out.

        Raises:
            InvariantError: It is not here.
        """
        index = self.position(request)
        if index == len(self.requests) or self.requests[index] is not request:
            raise InvariantError(f"request {request.handle} is not in this queue")
        del self.requests[index]
        self.num_uncached_tokens -= request.num_uncached_tokens

    def position(self, request: Request) -> int:
        """How many requests are served before this one, which need not be here."""
        return bisect_left(self.requests, request.rank, key=_BY_RANK)
