"""What the index is told of an engine, against a model of the index."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler import kv_feed
from services.scheduler.kv_feed import EngineCard, KvChange, KvFeed

CARD = EngineCard(
    engine_id=1,
    worker_id="w",
    scheduler_address="a:1",
    model="m",
    text_fp="t",
    kv_fp="k",
    block_size=4,
    num_blocks=9,
)


def unpacked(packed: bytes) -> set[bytes]:
    """The keys in it."""
    assert len(packed) % 16 == 0
    return {packed[start : start + 16] for start in range(0, len(packed), 16)}


class Index:
    """One copy of the index: contiguous or refused."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.seq = 0
        self.is_known = False
        self._chunks: set[bytes] = set()

    def take(self, change: KvChange, introduces: bool) -> tuple[str, int]:
        """Returns ("ok" or "need", seq)."""
        self.is_known = self.is_known or introduces
        assert self.is_known, "the first message of a stream must introduce the engine"
        if change.is_snapshot:
            self._chunks = unpacked(change.stored) | (self._chunks if change.chunk else set())
            if change.is_last:
                self.keys, self.seq = self._chunks, change.seq
            return "ok", self.seq
        if change.seq <= self.seq:
            return "ok", self.seq
        if change.seq != self.seq + 1:
            return "need", self.seq
        if change.is_cleared:
            self.keys.clear()
        self.keys -= unpacked(change.removed)
        self.keys |= unpacked(change.stored)
        self.seq = change.seq
        return "ok", self.seq


class Pair:
    """An engine's cache, its feed, and the stream between it and an index."""

    def __init__(self) -> None:
        self.cache: set[bytes] = set()
        self.feed = KvFeed(CARD, published_keys=lambda: b"".join(self.cache))
        self.index = Index()
        self.wire: list[tuple[KvChange, bool]] = []
        self.answers: list[tuple[str, int]] = []

    def store(self, key: bytes) -> None:
        self.cache.add(key)
        self.feed.change(stored=[key], removed=[])

    def remove(self, key: bytes) -> None:
        if key in self.cache:
            self.cache.discard(key)
            self.feed.change(stored=[], removed=[key])

    def clear(self) -> None:
        self.cache.clear()
        self.feed.change(stored=[], removed=[], is_cleared=True)

    def send(self) -> None:
        self.wire += self.feed.messages()

    def arrive(self) -> None:
        if self.wire:
            self.answers.append(self.index.take(*self.wire.pop(0)))

    def answer(self) -> None:
        if not self.answers:
            return
        kind, seq = self.answers.pop(0)
        if kind == "ok":
            self.feed.acknowledge(seq)
        else:
            self.feed.need_snapshot(seq)

    def break_stream(self, *, forgets: bool) -> None:
        self.wire.clear()
        self.answers.clear()
        if forgets:
            self.index = Index()
        self.feed.reconnect()

    def settle(self) -> None:
        for _ in range(50):
            self.send()
            while self.wire:
                self.arrive()
            while self.answers:
                self.answer()


KEYS = [bytes([i]) * 16 for i in range(8)]
EVENTS = st.one_of(
    st.tuples(st.sampled_from(["store", "remove"]), st.sampled_from(KEYS)),
    st.tuples(
        st.sampled_from(["clear", "send", "send", "arrive", "answer", "break", "forget"]),
        st.none(),
    ),
)


@given(st.lists(EVENTS, max_size=80))
def test_the_index_ends_up_with_what_the_engine_holds(
    events: list[tuple[str, bytes | None]],
) -> None:
    pair = Pair()
    for name, key in events:
        if key is not None:
            getattr(pair, name)(key)
        elif name in ("break", "forget"):
            pair.break_stream(forgets=name == "forget")
        else:
            getattr(pair, name)()
    pair.settle()
    assert pair.index.keys == pair.cache
    assert pair.feed.num_backlog_keys == 0


def test_an_index_that_is_away_costs_a_bounded_backlog_and_one_snapshot() -> None:
    pair = Pair()
    for number in range(3 * kv_feed.MAX_BACKLOG_KEYS):
        key = number.to_bytes(16, "little")
        pair.store(key)
        if number >= 1000:
            pair.remove((number - 1000).to_bytes(16, "little"))
    assert pair.feed.num_backlog_keys <= kv_feed.MAX_BACKLOG_KEYS
    pair.settle()
    assert pair.index.keys == pair.cache
    assert pair.feed.num_snapshots == 1


def test_a_large_snapshot_comes_in_chunks() -> None:
    pair = Pair()
    for number in range(kv_feed.SNAPSHOT_CHUNK_KEYS + 5):
        pair.cache.add(number.to_bytes(16, "little"))
    pair.feed.need_snapshot(0)
    pair.send()
    assert [(change.chunk, change.is_last) for change, _ in pair.wire] == [(0, False), (1, True)]
    pair.settle()
    assert pair.index.keys == pair.cache


def test_messages_on_their_way_are_bounded() -> None:
    pair = Pair()
    for key in KEYS * 10:
        pair.store(key)
        pair.send()
    assert len(pair.wire) <= kv_feed.MAX_UNACKED


def test_a_fenced_engine_says_nothing_more() -> None:
    pair = Pair()
    pair.store(KEYS[0])
    pair.send()
    pair.feed.fence()
    pair.store(KEYS[1])
    assert list(pair.feed.messages()) == []


def test_an_engine_that_has_ended_is_forgotten_once_the_index_knows() -> None:
    pair = Pair()
    pair.store(KEYS[0])
    pair.settle()
    pair.feed.end()
    assert not pair.feed.is_over
    pair.send()
    assert pair.wire[-1][0].is_gone
    pair.settle()
    assert pair.feed.is_over
