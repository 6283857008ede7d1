"""Whatever is said in whatever order, the index equals a naive model, and its bound holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from services.kvstore.events import Ack, AckStatus, EngineRecord, KvEvents, SnapshotChunk
from services.kvstore.index import PrefixIndex
from tests.unit.kvstore.keys import pack, record

UNIVERSE = range(6)
TIERS = ("", "host")
WORKERS = ("a", "b")

Held = set[tuple[str, int]]
some_keys = st.sets(st.sampled_from(UNIVERSE))
tiers = st.sampled_from(TIERS)
workers = st.sampled_from(WORKERS)


@dataclass
class Engine:
    """An engine as it really is, and what the index must have understood of it."""

    record: EngineRecord
    seq: int = 0
    truth: Held = field(default_factory=set)
    known_seq: int = 0
    known: Held = field(default_factory=set)
    is_known: bool = False

    def change(self, event: KvEvents, stored: set[int], removed: set[int]) -> None:
        """What an event does to the engine."""
        self.seq = event.seq
        if event.is_cleared:
            self.truth = set()
        self.truth -= {(event.tier, number) for number in removed}
        self.truth |= {(event.tier, number) for number in stored}

    def understood(self) -> None:
        """The index knows all up to now."""
        self.known_seq, self.known, self.is_known = self.seq, set(self.truth), True


class IndexMachine(RuleBasedStateMachine):
    """Publishers of two workers: events, losses, repeats, snapshots, restarts, ends."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_blocks=10_000, on_change=lambda: None)
        self.next_id = 1
        self.newest: dict[str, Engine] = {}
        self.newest_said: dict[str, int] = {}

    engines = Bundle("engines")

    @rule(target=engines, worker=workers)
    def start_engine(self, worker: str) -> Engine:
        engine = Engine(record(self.next_id, worker_id=worker))
        self.next_id += 1
        return engine

    @rule(
        engine=engines,
        stored=some_keys,
        removed=some_keys,
        is_cleared=st.booleans(),
        tier=tiers,
        is_lost=st.booleans(),
    )
    def change(
        self,
        engine: Engine,
        stored: set[int],
        removed: set[int],
        is_cleared: bool,
        tier: str,
        is_lost: bool,
    ) -> None:
        event = KvEvents(
            engine.record.engine_id,
            engine.seq + 1,
            stored=pack(stored),
            removed=pack(removed),
            is_cleared=is_cleared,
            tier=tier,
        )
        engine.change(event, stored, removed)
        if is_lost:
            return
        ack = self._say(engine, event)
        if ack.status is AckStatus.FENCED:
            return
        if engine.known_seq == engine.seq - 1:
            assert (ack.status, ack.seq) == (AckStatus.OK, engine.seq)
            engine.understood()
        else:
            assert (ack.status, ack.seq) == (AckStatus.NEED_SNAPSHOT, engine.known_seq)
            engine.is_known = True

    @rule(engine=engines, back=st.integers(0, 3), stored=some_keys)
    def repeat(self, engine: Engine, back: int, stored: set[int]) -> None:
        """Something that was applied comes again; its content no longer matters."""
        seq = engine.known_seq - back
        if not engine.is_known or seq < 1:
            return
        event = KvEvents(engine.record.engine_id, seq, stored=pack(stored))
        ack = self._say(engine, event)
        if ack.status is not AckStatus.FENCED:
            assert (ack.status, ack.seq) == (AckStatus.OK, engine.known_seq)

    @rule(engine=engines, is_cut=st.booleans())
    def snapshot(self, engine: Engine, is_cut: bool) -> None:
        """One chunk per tier; a cut one lacks the last."""
        engine.seq += 1
        for number, tier in enumerate(TIERS):
            is_last = tier == TIERS[-1]
            if is_last and is_cut:
                return
            event = KvEvents(
                engine.record.engine_id,
                engine.seq,
                stored=pack(sorted(n for t, n in engine.truth if t == tier)),
                tier=tier,
                snapshot=SnapshotChunk(engine.seq, number, is_last),
            )
            ack = self._say(engine, event)
            if ack.status is AckStatus.FENCED:
                return
            engine.is_known = True
            if is_last:
                engine.understood()
            assert (ack.status, ack.seq) == (AckStatus.OK, engine.known_seq)

    @rule(engine=engines)
    def stray_chunk(self, engine: Engine) -> None:
        """A chunk whose predecessors nobody saw changes nothing."""
        part = SnapshotChunk(engine.seq + 50, 7, True)
        event = KvEvents(engine.record.engine_id, stored=pack(UNIVERSE), snapshot=part)
        ack = self._say(engine, event)
        if ack.status is not AckStatus.FENCED:
            assert (ack.status, ack.seq) == (AckStatus.NEED_SNAPSHOT, engine.known_seq)
            engine.is_known = True

    @rule(engine=engines)
    def end_engine(self, engine: Engine) -> None:
        event = KvEvents(engine.record.engine_id, engine.seq + 1, is_gone=True)
        if self._say(engine, event, begins=False).status is not AckStatus.FENCED:
            self._forget(engine)

    @rule(worker=workers)
    def lease_ends(self, worker: str) -> None:
        engine = self.newest.get(worker)
        if engine is not None:
            self.index.forget(engine.record.engine_id)
            self._forget(engine)

    @rule()
    def sweep(self) -> None:
        self.index.sweep(3)

    def _say(self, engine: Engine, event: KvEvents, *, begins: bool = True) -> Ack:
        """Tell the index, and check that it fences exactly the engines that have a newer one."""
        ack = self.index.apply(event, record=engine.record)
        worker, engine_id = engine.record.worker_id, engine.record.engine_id
        newest = self.newest_said.get(worker, 0)
        assert (ack.status is AckStatus.FENCED) == (engine_id < newest)
        if ack.status is AckStatus.FENCED:
            assert ack.seen_engine_id == newest
        elif begins:
            older = self.newest.get(worker)
            if older is not None and older is not engine:
                self._forget(older)
            self.newest[worker] = engine
            self.newest_said[worker] = engine_id
        return ack

    def _forget(self, engine: Engine) -> None:
        engine.known_seq, engine.known, engine.is_known = 0, set(), False
        if self.newest.get(engine.record.worker_id) is engine:
            del self.newest[engine.record.worker_id]

    @invariant()
    def it_lists_what_the_model_knows(self) -> None:
        listed = {
            entry.record.engine_id: (entry.seq, entry.num_keys) for entry in self.index.engines()
        }
        assert listed == {
            e.record.engine_id: (e.known_seq, len(e.known)) for e in self.newest.values()
        }

    @invariant()
    def it_matches_what_the_model_matches(self) -> None:
        for chain in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [2], []):
            found = {m.record.engine_id: m.num_blocks for m in self.index.match(pack(chain))}
            expected = {
                e.record.engine_id: reach
                for e in self.newest.values()
                if (reach := _reach(e.known, chain))
            }
            assert {e: max(r.values()) for e, r in found.items()} == {
                e: max(r.values()) for e, r in expected.items()
            }
            for engine_id, reach in found.items():
                assert all(expected[engine_id][tier] == n for tier, n in reach.items())


def _reach(known: Held, chain: list[int]) -> dict[str, int]:
    """Per tier, how long a beginning lies on it and the tiers before it."""
    reach = {}
    for last in range(len(TIERS)):
        usable = {number for tier, number in known if tier in TIERS[: last + 1]}
        missing = [i for i, number in enumerate(chain) if number not in usable]
        length = missing[0] if missing else len(chain)
        if length:
            reach[TIERS[last]] = length
    return reach


class BoundMachine(RuleBasedStateMachine):
    """Engines of any announced size saying any amount: the bound of the index holds."""

    MAX_BLOCKS = 20

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_blocks=self.MAX_BLOCKS, on_change=lambda: None)
        self.seqs: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    @rule(
        engine_id=st.integers(1, 5),
        size=st.integers(0, 25),
        numbers=st.sets(st.integers(0, 30), max_size=12),
        is_snapshot=st.booleans(),
        is_last=st.booleans(),
    )
    def say(
        self, engine_id: int, size: int, numbers: set[int], is_snapshot: bool, is_last: bool
    ) -> None:
        seq = self.seqs[engine_id] = self.seqs.get(engine_id, 0) + 1
        size = self.sizes.setdefault(engine_id, size)
        part = SnapshotChunk(seq, 0, is_last) if is_snapshot else None
        event = KvEvents(engine_id, seq, stored=pack(numbers), snapshot=part)
        self.index.apply(event, record=record(engine_id, num_blocks=size))

    @rule(engine_id=st.integers(1, 5))
    def forget(self, engine_id: int) -> None:
        self.index.forget(engine_id)

    @invariant()
    def bound_holds(self) -> None:
        assert self.index.num_keys <= self.index.num_reserved_blocks <= self.MAX_BLOCKS

    @invariant()
    def only_indexed_engines_hold_keys_and_room(self) -> None:
        entries = self.index.engines()
        assert all(entry.num_keys == 0 for entry in entries if not entry.is_indexed)
        announced = sum(entry.record.num_blocks for entry in entries if entry.is_indexed)
        assert announced <= self.index.num_reserved_blocks
        if not any(entry.is_indexed for entry in entries):
            assert self.index.num_reserved_blocks == 0


TestIndexEqualsTheModel = IndexMachine.TestCase
TestIndexEqualsTheModel.settings = settings(max_examples=60, stateful_step_count=40)
TestBoundHolds = BoundMachine.TestCase
TestBoundHolds.settings = settings(max_examples=40, stateful_step_count=40)
