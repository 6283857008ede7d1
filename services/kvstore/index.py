"""The index in memory: per engine, the set of keys it holds by tier and KV group.

Pure: no asyncio, no clock, no network. It is advisory (a wrong answer costs a cache miss, never a
wrong token) and fenced: all that was said of an engine is void at once when the engine has gone or
a newer engine of its worker has been seen. One engine's events are applied without a gap or not at
all, so the index always equals some state that the engine really had.
"""

from __future__ import annotations

from collections.abc import Callable

from services.common.block_hash import KEY_SIZE_BYTES
from services.common.errors import InvalidRequest
from services.kvstore.engine_keys import EngineKeys, sweep
from services.kvstore.events import (
    Ack,
    AckStatus,
    EngineEntry,
    EngineMatch,
    EngineRecord,
    KvEvents,
    unpack_keys,
)

MAX_LOOKUPS = 65_536
"""Set lookups of one match, over all engines: some 5 ms, well inside a caller's 20."""

MAX_REMEMBERED_WORKERS = 65_536
"""Workers whose newest engine is remembered after it has gone, to refuse what is late."""


class PrefixIndex:
    """Who holds which blocks."""

    def __init__(self, *, max_blocks: int, on_change: Callable[[], None]) -> None:
        """
        Args:
            max_blocks: Bound of the sum of the engines' sizes; an engine that does not fit is
                listed, but its blocks are not kept until there is room.
            on_change: Called when the list of engines or a record has changed.
        """
        self._max_blocks = max_blocks
        self._engines: dict[int, EngineKeys] = {}
        self._newest: dict[str, int] = {}
        self._num_blocks = 0
        self._discarded: list[set[bytes]] = []
        self._on_change = on_change

    def apply(self, events: KvEvents, *, record: EngineRecord) -> Ack:
        """Take one event of an engine.

        Args:
            events: The change, a snapshot's chunk, or the engine's end.
            record: The engine as its publisher introduced it.

        Raises:
            InvalidRequest: Packed keys of a wrong length, or a record that is not this engine's.
        """
        fence = self.fence(events, record=record)
        if fence is not None:
            return fence
        if events.is_gone:
            self.forget(events.engine_id)
            return Ack(events.engine_id, AckStatus.OK, seq=events.seq)
        engine = self._admit(record)
        if not engine.is_indexed and not (engine.may_begin(events) and self._reserve(engine)):
            return engine.acknowledge_unread(events)
        ack = engine.apply(events)
        self._account(engine)
        return ack

    def fence(self, events: KvEvents, *, record: EngineRecord) -> Ack | None:
        """The answer to an event of an engine whose worker has a newer one; ``None`` otherwise.

        Raises:
            InvalidRequest: The record is not this engine's.
        """
        _check_record(record, events.engine_id)
        seen = self._newest.get(record.worker_id, 0)
        if record.engine_id >= seen:
            return None
        return Ack(events.engine_id, AckStatus.FENCED, seen_engine_id=seen)

    def forget(self, engine_id: int) -> None:
        """The engine has ended: nothing that it said holds any more. O(1)."""
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            self._release(engine)
            self._on_change()

    def match(
        self, packed_keys: bytes, *, max_blocks: int = 0, model: str = "", text_fp: str = ""
    ) -> list[EngineMatch]:
        """How much of a chain of keys each engine holds.

        The work is bounded: with many engines a very long chain is followed only so far, for all of
        them equally.

        Args:
            packed_keys: The chain, 16 bytes a key.
            max_blocks: Look at no more than these; 0 = all.
            model: Only engines of this model; "" = any.
            text_fp: Only engines of this text fingerprint; "" = any.

        Returns:
            The engines that hold at least the first block.

        Raises:
            InvalidRequest: The packed keys have a wrong length.
        """
        candidates = [
            engine
            for engine in self._engines.values()
            if engine.is_indexed
            and model in ("", engine.record.model)
            and text_fp in ("", engine.record.text_fp)
        ]
        num_sets = sum(engine.num_sets for engine in candidates)
        if len(packed_keys) % KEY_SIZE_BYTES:
            unpack_keys(packed_keys, field="keys")  # raises
        depth = min(max_blocks or MAX_LOOKUPS, MAX_LOOKUPS // max(num_sets, 1))
        keys = unpack_keys(packed_keys[: depth * KEY_SIZE_BYTES], field="keys")
        found = (EngineMatch(engine.record, engine.match(keys)) for engine in candidates)
        return [match for match in found if match.num_blocks]

    def engines(self, *, model: str = "") -> list[EngineEntry]:
        """All engines, oldest first; only those of ``model`` unless that is ""."""
        return [
            EngineEntry(engine.record, engine.seq, engine.num_keys, engine.is_indexed)
            for _, engine in sorted(self._engines.items())
            if model in ("", engine.record.model)
        ]

    def engine(self, engine_id: int) -> EngineKeys | None:
        """What is known of one engine."""
        return self._engines.get(engine_id)

    @property
    def num_keys(self) -> int:
        """Keys held for all engines."""
        return sum(engine.num_keys for engine in self._engines.values())

    @property
    def num_reserved_blocks(self) -> int:
        """What counts against the bound."""
        return self._num_blocks

    def sweep(self, max_keys: int) -> bool:
        """Free memory of what has been forgotten, a little at a time.

        Freeing a million keys at once would hold up everybody for tens of milliseconds.

        Returns:
            Whether there is more.
        """
        return sweep(self._discarded, max_keys)

    def _admit(self, record: EngineRecord) -> EngineKeys:
        engine = self._engines.get(record.engine_id)
        if engine is None:
            self._supersede(record)
            engine = self._engines[record.engine_id] = EngineKeys(record, self._discarded)
            self._on_change()
        elif engine.record != record:
            engine.record = record
            self._on_change()
        return engine

    def _supersede(self, record: EngineRecord) -> None:
        older = self._newest.pop(record.worker_id, None)
        if older is not None:
            self.forget(older)
        self._newest[record.worker_id] = record.engine_id
        if len(self._newest) > MAX_REMEMBERED_WORKERS:
            self._forget_a_worker()

    def _forget_a_worker(self) -> None:
        """Drop the fence of the worker that has been silent the longest."""
        gone = (w for w, engine_id in self._newest.items() if engine_id not in self._engines)
        worker_id = next(gone, None)
        if worker_id is not None:
            del self._newest[worker_id]

    def _reserve(self, engine: EngineKeys) -> bool:
        """Make room for an engine, if there is any."""
        if self._num_blocks + engine.size > self._max_blocks:
            return False
        engine.begin()
        engine.reserved = engine.size
        self._num_blocks += engine.reserved
        return True

    def _release(self, engine: EngineKeys) -> None:
        self._num_blocks -= engine.reserved
        engine.drop()

    def _account(self, engine: EngineKeys) -> None:
        """An engine that outgrows what it announced counts as what it holds, and may be dropped."""
        self._num_blocks += engine.size - engine.reserved
        engine.reserved = engine.size
        if self._num_blocks > self._max_blocks:
            self._release(engine)


def _check_record(record: EngineRecord, engine_id: int) -> None:
    if record.engine_id != engine_id:
        raise InvalidRequest(
            f"the record is of engine {record.engine_id}, the event of {engine_id}", param="record"
        )
    if not record.worker_id:
        raise InvalidRequest(f"engine {engine_id} has no worker_id", param="record.worker_id")
