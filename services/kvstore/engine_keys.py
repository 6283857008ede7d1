"""The keys that one engine holds, and the rules by which its events apply.

Events are applied in order or refused. A snapshot is collected aside and replaces everything once
its last chunk has come; until then the old state answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest
from services.kvstore.events import (
    DEVICE_TIER,
    Ack,
    AckStatus,
    EngineRecord,
    KvEvents,
    SnapshotChunk,
    unpack_keys,
)

Place = tuple[str, int]
"""A tier and a KV group."""

MAX_PLACES = 64
"""Tiers times groups of one engine."""


@dataclass(slots=True)
class _Staging:
    """A snapshot that is still coming."""

    base_seq: int
    num_chunks: int = 0
    keys: dict[Place, set[bytes]] = field(default_factory=dict)


class EngineKeys:
    """One engine in the index.

    Attributes:
        record: The engine.
        seq: The last event applied; all before it are applied too.
        is_indexed: Whether its keys are kept; else events are acknowledged unread.
        reserved: Blocks that count against the index's bound on its behalf.
    """

    def __init__(self, record: EngineRecord, discarded: list[set[bytes]]) -> None:
        """
        Args:
            record: The engine.
            discarded: Where sets go that are not needed any more (see ``PrefixIndex.sweep``).
        """
        self.record = record
        self.seq = 0
        self.is_indexed = False
        self.reserved = 0
        self._keys: dict[Place, set[bytes]] = {}
        self._staging: _Staging | None = None
        self._discarded = discarded
        self._largest = 0
        self._has_missed = False

    @property
    def num_keys(self) -> int:
        """Keys held, all tiers and groups together."""
        return sum(map(len, self._keys.values()))

    @property
    def num_sets(self) -> int:
        """Lookups that one key of a match may cost."""
        return max(len(self._keys), 1)

    @property
    def size(self) -> int:
        """What counts against the index's bound: the announced blocks, or what was really said."""
        return max(self.record.num_blocks, self._largest)

    def may_begin(self, events: KvEvents) -> bool:
        """Whether keys can be kept from this event on.

        Not from the midst of a snapshot whose first chunks were acknowledged unread: its publisher
        would take the demand for another one as an answer to what it sent before.
        """
        return not self._has_missed or events.snapshot is None or events.snapshot.chunk == 0

    def begin(self) -> None:
        """Keep keys from now on; if some were missed, the next event is answered accordingly."""
        self.is_indexed = True
        self._has_missed = False
        self.seq = 0

    def apply(self, events: KvEvents) -> Ack:
        """Apply an event if it is the next one.

        Raises:
            InvalidRequest: Packed keys of a wrong length, or too many tiers and groups; nothing has
                changed.
        """
        if events.snapshot is not None:
            return self._stage(events, events.snapshot)
        if events.seq > self.seq + 1:
            return self._need_snapshot()
        if events.seq == self.seq + 1:
            self._change(events)
            self.seq = events.seq
        return self._ok()  # one that is known already was sent again: its answer got lost

    def acknowledge_unread(self, events: KvEvents) -> Ack:
        """Take note of an event whose keys are not kept."""
        self._has_missed = True
        snapshot = events.snapshot
        if snapshot is None:
            self.seq = max(self.seq, events.seq)
        elif snapshot.is_last:
            self.seq = max(self.seq, snapshot.base_seq)
        return self._ok()

    def drop(self) -> None:
        """Forget all keys and keep none until ``begin``."""
        self._discarded.extend(self._keys.values())
        self._discard_staging()
        self._keys = {}
        self.reserved = 0
        self.is_indexed = False
        self._has_missed = True

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How far the unbroken beginning of a chain goes with each tier and those before it.

        The device tier comes first, then the others by name; the last number is the whole reach. A
        tier holds a block if each of its groups does.

        Returns:
            Tier → number of blocks, > 0; empty if nobody holds the first one.
        """
        reach: dict[str, int] = {}
        usable: list[list[set[bytes]]] = []
        length = 0
        for tier, groups in self._by_tier().items():
            usable.append(groups)
            length = _unbroken(keys, length, usable)
            if length:
                reach[tier] = length
        return reach

    def snapshot(self) -> dict[Place, set[bytes]]:
        """Everything that is held at ``seq``; not to be changed."""
        return self._keys

    def _by_tier(self) -> dict[str, list[set[bytes]]]:
        tiers: dict[str, list[set[bytes]]] = {}
        for tier, group in sorted(self._keys, key=lambda place: (place[0] != DEVICE_TIER, place)):
            tiers.setdefault(tier, []).append(self._keys[tier, group])
        return tiers

    def _change(self, events: KvEvents) -> None:
        self._check_place((events.tier, events.group), among=self._keys)
        stored = unpack_keys(events.stored, field="stored")
        removed = unpack_keys(events.removed, field="removed")
        if events.is_cleared:
            self._discarded.extend(self._keys.values())
            self._keys = {}
        place = (events.tier, events.group)
        held = self._keys.get(place)
        if held is None and stored:
            held = self._keys[place] = set()
        if held is not None:
            held.difference_update(removed)
            held.update(stored)
            self._largest = max(self._largest, self.num_keys)

    def _stage(self, events: KvEvents, part: SnapshotChunk) -> Ack:
        if part.chunk == 0:
            self._discard_staging()
            self._staging = _Staging(part.base_seq)
        staging = self._staging
        if staging is None or (staging.base_seq, staging.num_chunks) != (part.base_seq, part.chunk):
            self._discard_staging()
            return self._need_snapshot()
        self._check_place((events.tier, events.group), among=staging.keys)
        keys = unpack_keys(events.stored, field="stored")
        staging.keys.setdefault((events.tier, events.group), set()).update(keys)
        staging.num_chunks += 1
        self._largest = max(self._largest, sum(map(len, staging.keys.values())))
        if part.is_last:
            self._replace(staging)
        return self._ok()

    def _replace(self, staging: _Staging) -> None:
        if staging.base_seq < self.seq:  # sent before events that have been applied meanwhile
            self._discard_staging()
            return
        self._discarded.extend(self._keys.values())
        self._keys, self.seq, self._staging = staging.keys, staging.base_seq, None

    def _discard_staging(self) -> None:
        if self._staging is not None:
            self._discarded.extend(self._staging.keys.values())
            self._staging = None

    def _check_place(self, place: Place, *, among: dict[Place, set[bytes]]) -> None:
        if place not in among and len(among) >= MAX_PLACES:
            raise InvalidRequest(
                f"engine {self.record.engine_id} has more than {MAX_PLACES} tiers and groups",
                param="tier",
            )

    def _ok(self) -> Ack:
        return Ack(self.record.engine_id, AckStatus.OK, seq=self.seq)

    def _need_snapshot(self) -> Ack:
        return Ack(self.record.engine_id, AckStatus.NEED_SNAPSHOT, seq=self.seq)


def _unbroken(keys: Sequence[bytes], start: int, tiers: list[list[set[bytes]]]) -> int:
    """How long the unbroken beginning of a chain is that reaches to ``start`` at least."""
    rest = range(start, len(keys))
    if len(tiers) == 1 and len(tiers[0]) == 1:  # nearly always, and ten times as fast
        held = tiers[0][0]
        return next((i for i in rest if keys[i] not in held), len(keys))
    return next((i for i in rest if not _is_held(keys[i], tiers)), len(keys))


def _is_held(key: bytes, tiers: list[list[set[bytes]]]) -> bool:
    return any(all(key in group for group in groups) for groups in tiers)


def sweep(discarded: list[set[bytes]], max_keys: int) -> bool:
    """Free at most ``max_keys`` keys of discarded sets; returns whether there are more."""
    while discarded and max_keys > 0:
        keys = discarded[-1]
        for _ in range(min(len(keys), max_keys)):
            keys.pop()
            max_keys -= 1
        if not keys:
            discarded.pop()
    return bool(discarded)
