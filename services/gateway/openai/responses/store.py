"""Responses that are kept: in this gateway's memory, those of each API key by themselves.

Bounded in number, bytes and age; the oldest go first. What a kept response goes on from is kept
with it, though it may no longer be found by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from services.common.errors import NotFound
from services.gateway.openai.responses.items import Item


@dataclass(slots=True, eq=False)
class Turn:
    """A response that has ended, as part of a conversation.

    Attributes:
        response: JSON of it.
        given: JSON of the items that it was given.
        before: What it goes on from.
        events: Its events, where they can be read again.
        num_holders: Of the store: places that keep it.
    """

    response: bytes
    given: bytes
    before: Turn | None = None
    events: tuple[bytes, ...] = ()
    num_holders: int = field(default=0, repr=False)

    @property
    def size_bytes(self) -> int:
        """Of itself, without what was before."""
        return len(self.response) + len(self.given) + sum(map(len, self.events))

    def conversation(self) -> list[Item]:
        """Every item from the beginning up to its own output."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        items: list[Item] = []
        for turn in reversed(turns):
            items += orjson.loads(turn.given)
            items += orjson.loads(turn.response)["output"]
        return items


class ResponseStore:
    """Keeps turns by tenant and id, oldest first."""

    def __init__(
        self,
        *,
        max_responses: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            max_responses: Most that can be found.
            max_bytes: Most bytes, together with what they go on from.
            ttl_s: How long one can be found.
            clock: Seconds that only grow.
        """
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: dict[tuple[str, str], tuple[Turn, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, response_id: str, turn: Turn) -> None:
        """Keep a response; older ones make room.

        Args:
            tenant: Whose it is; nobody else finds it.
            response_id: Unique.
            turn: It.
        """
        self._kept[tenant, response_id] = (turn, self._clock())
        self._hold(turn)
        self._drop_old()
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, tenant: str, response_id: str) -> Turn:
        """A response.

        Raises:
            NotFound: It is not kept, or is somebody else's.
        """
        self._drop_old()
        kept = self._kept.get((tenant, response_id))
        if kept is None:
            raise self.not_found(response_id)
        return kept[0]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response.

        Raises:
            NotFound: It is not kept, or is somebody else's.
        """
        self.get(tenant, response_id)
        self._drop((tenant, response_id))

    def not_found(self, response_id: str) -> NotFound:
        """What is told of a response that is not there."""
        return NotFound(
            f"no response {response_id[:80]!r} is stored here; a gateway keeps its own responses "
            f"in memory, at most {self._max_responses} for up to {self._ttl_s:g} s"
        )

    def _drop_old(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._kept:
            key, (_, stored_at) = next(iter(self._kept.items()))
            if stored_at > oldest:
                return
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        turn, _ = self._kept.pop(key)
        self._release(turn)

    def _hold(self, turn: Turn) -> None:
        """One more place keeps a turn; the first also keeps what was before it."""
        held: Turn | None = turn
        while held is not None:
            held.num_holders += 1
            if held.num_holders > 1:
                return
            self.num_bytes += held.size_bytes
            held = held.before

    def _release(self, turn: Turn) -> None:
        held: Turn | None = turn
        while held is not None:
            held.num_holders -= 1
            if held.num_holders:
                return
            self.num_bytes -= held.size_bytes
            held = held.before
