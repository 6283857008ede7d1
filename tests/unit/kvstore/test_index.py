"""The index in memory, one behaviour a test."""

from __future__ import annotations

import time

import pytest

from services.common.errors import InvalidRequest
from services.kvstore.events import AckStatus, KvEvents
from services.kvstore.index import MAX_LOOKUPS, PrefixIndex
from tests.unit.kvstore.keys import chunk, pack, record, stored


def _index(max_blocks: int = 1_000_000) -> PrefixIndex:
    return PrefixIndex(max_blocks=max_blocks, on_change=lambda: None)


def _matched(index: PrefixIndex, numbers: range | list[int]) -> dict[int, dict[str, int]]:
    return {m.record.engine_id: m.num_blocks for m in index.match(pack(numbers))}


class TestEvents:
    def test_stored_blocks_are_found_from_the_first_on(self) -> None:
        index = _index()
        ack = index.apply(stored(1, 1, [1, 2, 4]), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.OK, 1)
        assert _matched(index, [1, 2, 3, 4]) == {1: {"": 2}}
        assert _matched(index, [2, 1]) == {1: {"": 2}}
        assert _matched(index, [3]) == {}

    def test_cleared_comes_before_removed_before_stored(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1, 2, 3]), record=record(1))
        index.apply(
            KvEvents(1, 2, stored=pack([2]), removed=pack([2]), is_cleared=True), record=record(1)
        )
        assert _matched(index, [2]) == {1: {"": 1}}
        assert _matched(index, [1]) == {}

    def test_a_gap_is_refused_and_changes_nothing(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1]), record=record(1))
        ack = index.apply(stored(1, 3, [2]), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.NEED_SNAPSHOT, 1)
        assert _matched(index, [2]) == {}

    def test_an_engine_that_begins_in_the_middle_needs_a_snapshot(self) -> None:
        ack = _index().apply(stored(1, 7, [1]), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.NEED_SNAPSHOT, 0)

    def test_an_event_that_was_sent_again_is_acknowledged_and_not_applied_again(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1]), record=record(1))
        index.apply(KvEvents(1, 2, removed=pack([1])), record=record(1))
        ack = index.apply(stored(1, 1, [1]), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.OK, 2)
        assert _matched(index, [1]) == {}

    @pytest.mark.parametrize("field", ["stored", "removed"])
    def test_keys_of_a_wrong_length_are_refused_and_change_nothing(self, field: str) -> None:
        index = _index()
        index.apply(stored(1, 1, [1]), record=record(1))
        bad = KvEvents(1, 2, is_cleared=True, **{field: b"short"})
        with pytest.raises(InvalidRequest, match=f"{field} holds 5 bytes"):
            index.apply(bad, record=record(1))
        assert _matched(index, [1]) == {1: {"": 1}}
        assert index.apply(stored(1, 2, [2]), record=record(1)).status is AckStatus.OK

    def test_a_record_of_another_engine_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="record is of engine 2"):
            _index().apply(stored(1, 1, [1]), record=record(2))

    def test_an_endless_number_of_tiers_is_refused(self) -> None:
        index = _index()
        for seq in range(1, 65):
            index.apply(stored(1, seq, [1], tier=f"t{seq}"), record=record(1))
        with pytest.raises(InvalidRequest, match="more than 64 tiers"):
            index.apply(stored(1, 65, [1], tier="one more"), record=record(1))


class TestSnapshots:
    def test_a_snapshot_replaces_everything_once_its_last_chunk_has_come(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1, 2]), record=record(1))
        first = chunk(1, [5], base_seq=9, number=0, is_last=False)
        ack = index.apply(first, record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.OK, 1)
        assert _matched(index, [1, 2]) == {1: {"": 2}}
        ack = index.apply(chunk(1, [6], base_seq=9, number=1), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.OK, 9)
        assert _matched(index, [5, 6]) == {1: {"": 2}}
        assert _matched(index, [1]) == {}
        assert index.apply(stored(1, 10, [7]), record=record(1)).status is AckStatus.OK

    def test_a_snapshot_that_begins_again_drops_what_had_come(self) -> None:
        index = _index()
        index.apply(chunk(1, [1], base_seq=3, is_last=False), record=record(1))
        index.apply(chunk(1, [2], base_seq=5), record=record(1))
        assert _matched(index, [1]) == {}
        assert _matched(index, [2]) == {1: {"": 1}}

    def test_a_snapshot_that_is_older_than_what_was_applied_changes_nothing(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1]), record=record(1))
        index.apply(stored(1, 2, [2]), record=record(1))
        ack = index.apply(chunk(1, [9], base_seq=1), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.OK, 2)
        assert _matched(index, [1, 2]) == {1: {"": 2}}

    def test_an_engine_that_begins_in_the_middle_of_a_snapshot_needs_another(self) -> None:
        ack = _index().apply(chunk(1, [1], base_seq=5, number=1), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.NEED_SNAPSHOT, 0)

    @pytest.mark.parametrize(("base_seq", "number"), [(3, 2), (4, 1), (3, 1)])
    def test_a_chunk_out_of_order_is_refused(self, base_seq: int, number: int) -> None:
        index = _index()
        index.apply(stored(1, 1, [1]), record=record(1))
        if (base_seq, number) != (3, 1):  # else: a chunk without its first
            index.apply(chunk(1, [2], base_seq=3, is_last=False), record=record(1))
        ack = index.apply(chunk(1, [3], base_seq=base_seq, number=number), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.NEED_SNAPSHOT, 1)
        assert _matched(index, [1]) == {1: {"": 1}}


class TestEngines:
    def test_a_newer_engine_of_a_worker_voids_the_older_at_once(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1]), record=record(1, worker_id="w"))
        index.apply(stored(2, 1, [2]), record=record(2, worker_id="w"))
        assert _matched(index, [1]) == {}
        assert [entry.record.engine_id for entry in index.engines()] == [2]

    def test_an_older_engine_of_a_worker_is_fenced_even_after_the_newer_has_gone(self) -> None:
        index = _index()
        index.apply(stored(2, 1, [2]), record=record(2, worker_id="w"))
        index.apply(KvEvents(2, 2, is_gone=True), record=record(2, worker_id="w"))
        ack = index.apply(stored(1, 1, [1]), record=record(1, worker_id="w"))
        assert (ack.status, ack.seen_engine_id) == (AckStatus.FENCED, 2)
        assert index.engines() == []

    def test_an_engine_that_has_gone_is_forgotten(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1]), record=record(1))
        ack = index.apply(KvEvents(1, 2, is_gone=True), record=record(1))
        assert (ack.status, ack.seq) == (AckStatus.OK, 2)
        assert index.engines() == []
        assert index.num_reserved_blocks == 0

    def test_forgetting_does_not_depend_on_the_number_of_keys(self) -> None:
        index = _index()
        index.apply(stored(1, 1, range(300_000)), record=record(1))
        began_at = time.perf_counter()
        index.forget(1)
        forgetting_s = time.perf_counter() - began_at
        began_at = time.perf_counter()
        while index.sweep(10_000):
            pass
        assert forgetting_s < (time.perf_counter() - began_at) / 10

    def test_forgotten_keys_are_freed_a_few_at_a_time(self) -> None:
        index = _index()
        index.apply(stored(1, 1, range(25)), record=record(1))
        index.forget(1)
        assert [index.sweep(10) for _ in range(4)] == [True, True, False, False]

    def test_the_list_says_what_each_engine_is_and_has(self) -> None:
        index = _index()
        index.apply(stored(2, 1, [1, 2]), record=record(2))
        index.apply(stored(1, 1, []), record=record(1))
        entries = index.engines(model="m")
        assert [(e.record, e.seq, e.num_keys, e.is_indexed) for e in entries] == [
            (record(1), 1, 0, True),
            (record(2), 1, 2, True),
        ]
        assert index.engines(model="other") == []

    def test_changes_of_the_list_are_told_and_others_are_not(self) -> None:
        changes: list[None] = []
        index = PrefixIndex(max_blocks=100, on_change=lambda: changes.append(None))
        index.apply(stored(1, 1, [1]), record=record(1))
        index.apply(stored(1, 2, [2]), record=record(1))
        assert len(changes) == 1
        index.forget(1)
        index.forget(1)
        assert len(changes) == 2


class TestMatch:
    def test_only_engines_of_the_model_and_fingerprint_answer(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1]), record=record(1))
        assert index.match(pack([1]), model="m", text_fp="fp")
        assert not index.match(pack([1]), model="m", text_fp="other")
        assert not index.match(pack([1]), model="other", text_fp="fp")

    def test_a_further_tier_adds_to_the_reach_of_those_before_it(self) -> None:
        index = _index()
        index.apply(stored(1, 1, [1, 2, 5]), record=record(1))
        index.apply(stored(1, 2, [3, 4], tier="host"), record=record(1))
        assert _matched(index, [1, 2, 3, 4, 5, 6]) == {1: {"": 2, "host": 5}}

    def test_a_block_is_held_once_every_group_holds_it(self) -> None:
        index = _index()
        index.apply(KvEvents(1, 1, stored=pack([1, 2]), group=0), record=record(1))
        index.apply(KvEvents(1, 2, stored=pack([1]), group=1), record=record(1))
        assert _matched(index, [1, 2]) == {1: {"": 1}}

    def test_no_more_than_max_blocks_are_looked_at(self) -> None:
        index = _index()
        index.apply(stored(1, 1, range(10)), record=record(1))
        (match,) = index.match(pack(range(10)), max_blocks=4)
        assert match.num_blocks == {"": 4}

    def test_the_work_is_bounded_over_all_engines_equally(self) -> None:
        index = _index()
        for engine_id in range(1, 9):
            index.apply(stored(engine_id, 1, range(9_000)), record=record(engine_id))
        reach = MAX_LOOKUPS // 8
        assert _matched(index, range(9_000)) == {e: {"": reach} for e in range(1, 9)}

    def test_keys_of_a_wrong_length_are_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="keys holds 17 bytes"):
            _index().match(b"x" * 17)


class TestBound:
    def test_an_engine_beyond_the_bound_is_listed_without_its_blocks(self) -> None:
        index = _index(max_blocks=150)
        index.apply(stored(1, 1, [1]), record=record(1, num_blocks=100))
        ack = index.apply(stored(2, 1, [1]), record=record(2, num_blocks=100))
        assert ack.status is AckStatus.OK
        assert _matched(index, [1]) == {1: {"": 1}}
        assert [entry.is_indexed for entry in index.engines()] == [True, False]

    def test_it_is_taken_in_by_a_snapshot_once_there_is_room(self) -> None:
        index = _index(max_blocks=150)
        index.apply(stored(1, 1, [1]), record=record(1))
        index.apply(stored(2, 1, [1]), record=record(2))
        index.apply(KvEvents(1, 2, is_gone=True), record=record(1))
        ack = index.apply(stored(2, 2, [2]), record=record(2))
        assert (ack.status, ack.seq) == (AckStatus.NEED_SNAPSHOT, 0)
        index.apply(chunk(2, [1, 2], base_seq=3), record=record(2))
        assert _matched(index, [1, 2]) == {2: {"": 2}}

    def test_a_snapshot_is_not_taken_in_from_its_middle(self) -> None:
        index = _index(max_blocks=150)
        index.apply(stored(1, 1, [1]), record=record(1))
        index.apply(chunk(2, [1], base_seq=4, number=0, is_last=False), record=record(2))
        index.forget(1)
        ack = index.apply(chunk(2, [2], base_seq=4, number=1), record=record(2))
        assert (ack.status, ack.seq) == (AckStatus.OK, 4)
        assert not index.engines()[0].is_indexed

    def test_an_engine_that_says_more_than_it_announced_is_dropped_whole(self) -> None:
        index = _index(max_blocks=150)
        index.apply(stored(1, 1, range(10)), record=record(1, num_blocks=10))
        index.apply(stored(2, 1, range(50)), record=record(2, num_blocks=10))
        index.apply(stored(2, 2, range(50, 200)), record=record(2, num_blocks=10))
        assert _matched(index, [0]) == {1: {"": 1}}
        assert index.num_keys == index.num_reserved_blocks == 10

    def test_chunks_that_wait_for_their_last_count_too(self) -> None:
        index = _index(max_blocks=150)
        for number in range(3):
            keys = range(number * 100, number * 100 + 100)
            part = chunk(1, keys, base_seq=1, number=number, is_last=False)
            index.apply(part, record=record(1))
        assert not index.engines()[0].is_indexed
        assert index.num_reserved_blocks == 0
