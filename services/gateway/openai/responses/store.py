"""Responses that are kept: in this gateway's memory, those of each API key by themselves.

Bounded in number, bytes and age; the oldest go first. What a kept response goes on from is kept
with it, though it may no longer be found by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        item_ids: Of its items, given and put out.
        num_holders: Of the store: places that keep it.
    """

    response: bytes
    given: bytes
    before: Turn | None = None
    events: tuple[bytes, ...] = ()
    item_ids: tuple[str, ...] = ()
    num_holders: int = field(default=0, repr=False)

    @classmethod
    def of(
        cls,
        response: dict[str, Any],
        *,
        given: Sequence[Item],
        before: Turn | None,
        events: tuple[bytes, ...] = (),
    ) -> Turn:
        """The turn of a response.

        Args:
            response: It.
            given: The items that it was given.
            before: What it goes on from.
            events: Its events, where they can be read again.
        """
        ids = tuple(item["id"] for item in (*given, *response["output"]))
        return cls(orjson.dumps(response), orjson.dumps(given), before, events, ids)

    @property
    def size_bytes(self) -> int:
        """Of itself, without what was before."""
        parts = (self.response, self.given, *self.events, *self.item_ids)
        return sum(map(len, parts))

    def items(self) -> list[Item]:
        """What it was given, and what it put out."""
        given: list[Item] = orjson.loads(self.given)
        output: list[Item] = orjson.loads(self.response)["output"]
        return given + output

    def conversation(self) -> list[Item]:
        """Every item from the beginning up to its own output."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [item for turn in reversed(turns) for item in turn.items()]


_Key = tuple[str, str]
"""Tenant and id."""


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
        self._kept: dict[_Key, tuple[Turn, float]] = {}
        self._response_of: dict[_Key, _Key] = {}  # of each item, under the same tenant

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, response_id: str, turn: Turn) -> None:
        """Keep a response; older ones make room.

        Args:
            tenant: Whose it is; nobody else finds it.
            response_id: Unique.
            turn: It.
        """
        key = (tenant, response_id)
        self._kept[key] = (turn, self._clock())
        self._response_of.update({(tenant, item_id): key for item_id in turn.item_ids})
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

    def item(self, tenant: str, item_id: str) -> Item | None:
        """An item of a response that is kept; ``None`` = none, or it is somebody else's."""
        self._drop_old()
        key = self._response_of.get((tenant, item_id))
        if key is None:
            return None
        turn, _ = self._kept[key]
        return next(item for item in turn.items() if item["id"] == item_id)

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

    def _drop(self, key: _Key) -> None:
        turn, _ = self._kept.pop(key)
        tenant, _ = key
        for item_id in turn.item_ids:
            if self._response_of.get((tenant, item_id)) == key:
                del self._response_of[tenant, item_id]
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
