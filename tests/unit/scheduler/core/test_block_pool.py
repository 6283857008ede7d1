"""The block pool, one behaviour a test."""

from __future__ import annotations

import pytest

from services.common.errors import InvariantError
from services.scheduler.core.block_pool import NULL_BLOCK_ID, BlockPool
from tests.unit.scheduler.core.invariants import check_pool, free_list

ROOT = b"root"
A, B, C, X = (name * 16 for name in (b"a", b"b", b"c", b"x"))


def _keyed(
    pool: BlockPool, keys: list[bytes], *, writer: int = 1, step: int | None = None
) -> list[int]:
    """Take a block for each key of a chain."""
    block_ids = pool.allocate(len(keys), writer=writer)
    parent = ROOT
    for block_id, key in zip(block_ids, keys, strict=True):
        pool.set_key(block_id, key, parent=parent, step=step)
        parent = key
    return block_ids


def test_blocks_are_given_out_in_order_of_their_ids_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.allocate(4, writer=1) == [1, 2, 3, 4]
    assert pool.num_free == 0 and NULL_BLOCK_ID not in free_list(pool)


def test_taking_more_than_there_are_free_is_refused_and_takes_nothing() -> None:
    pool = BlockPool(5)
    with pytest.raises(InvariantError, match="5 blocks wanted, 4 free"):
        pool.allocate(5, writer=1)
    assert pool.num_free == 4


def test_a_block_freed_twice_is_refused() -> None:
    pool = BlockPool(5)
    block_ids = pool.allocate(1, writer=1)
    pool.release(block_ids)
    with pytest.raises(InvariantError, match="freed twice"):
        pool.release(block_ids)


def test_a_block_without_a_key_is_the_next_to_be_taken() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2, writer=1)
    pool.release([first])
    pool.release([second])
    assert free_list(pool) == [second, first, 3, 4]


def test_a_block_with_a_key_is_the_last_to_be_taken_and_a_tail_goes_before_its_head() -> None:
    pool = BlockPool(5)
    head, tail = _keyed(pool, [A, B])
    pool.release([tail, head])
    assert free_list(pool) == [3, 4, tail, head]
    check_pool(pool)


def test_a_freed_block_is_found_again_by_its_key_until_it_is_taken_for_something_else() -> None:
    pool = BlockPool(5)
    block_ids = _keyed(pool, [A, B])
    pool.release(reversed(block_ids))
    assert pool.find_prefix([A, B, C], max_blocks=3) == block_ids
    pool.allocate(3, writer=2)  # two that were never used, then the tail
    assert pool.find_prefix([A, B], max_blocks=3) == block_ids[:1]
    check_pool(pool)


def test_a_lookup_stops_at_the_first_miss_and_at_the_maximum() -> None:
    pool = BlockPool(6)
    block_ids = _keyed(pool, [A, B, C])
    assert pool.find_prefix([A, X, C], max_blocks=3) == block_ids[:1]
    assert pool.find_prefix([A, B, C], max_blocks=2) == block_ids[:2]


def test_a_hit_takes_the_block_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(5)
    block_ids = _keyed(pool, [A, B, C])
    pool.release(reversed(block_ids))
    pool.touch([block_ids[1]])
    assert pool.num_free == 3 and block_ids[1] not in free_list(pool)
    pool.touch([block_ids[1]])
    assert pool.ref_count(block_ids[1]) == 2
    check_pool(pool)


def test_one_key_may_live_in_several_blocks_and_is_found_while_one_copy_is_left() -> None:
    pool = BlockPool(6)
    copies = [_keyed(pool, [A])[0] for _ in range(3)]
    for copy in copies:
        assert pool.find_prefix([A], max_blocks=1)[0] in copies
        pool.release([copy])
        check_pool(pool)
    assert pool.allocate(4, writer=2)[-1] == copies[1]  # two unused, then the copies freed first
    assert pool.find_prefix([A], max_blocks=1) == [copies[2]]
    check_pool(pool)


def test_the_first_copy_is_stored_and_the_last_is_removed() -> None:
    pool = BlockPool(4)
    first, second = _keyed(pool, [A]), _keyed(pool, [A])
    assert pool.take_events().stored == [A]
    pool.release(first)
    pool.release(second)
    pool.allocate(2, writer=2)
    assert not pool.take_events(), "a copy is left"
    pool.allocate(1, writer=2)
    assert pool.take_events().removed == [A]
    assert pool.published_keys() == b""


def test_a_key_stored_and_removed_between_two_looks_is_not_an_event() -> None:
    pool = BlockPool(2)
    pool.release(_keyed(pool, [A]))
    pool.release(_keyed(pool, [B]))
    events = pool.take_events()
    assert events.stored == [B] and events.removed == []
    pool.release(_keyed(pool, [C]))
    pool.release(_keyed(pool, [B]))
    assert not pool.take_events(), "removed and stored again"


def test_a_tentative_key_is_hit_but_not_published_until_its_step_is_confirmed() -> None:
    pool = BlockPool(5)
    block_ids = _keyed(pool, [A], step=3)
    assert pool.find_prefix([A], max_blocks=1) == block_ids
    assert not pool.take_events()
    pool.confirm(2)
    assert not pool.take_events()
    pool.confirm(3)
    assert pool.take_events().stored == [A]
    check_pool(pool)


def test_a_tentative_block_that_was_taken_for_something_else_is_not_confirmed() -> None:
    pool = BlockPool(2)
    pool.release(_keyed(pool, [A], step=3))
    _keyed(pool, [B], step=4)
    pool.confirm(3)
    assert not pool.take_events()
    pool.confirm(4)
    assert pool.take_events().stored == [B]
    check_pool(pool)


def test_a_failed_step_drops_the_tentative_keys_and_keeps_the_confirmed() -> None:
    pool = BlockPool(5)
    good = _keyed(pool, [A])
    _keyed(pool, [B], step=3)
    pool.drop_tentative()
    assert pool.find_prefix([B], max_blocks=1) == []
    assert pool.find_prefix([A], max_blocks=1) == good
    check_pool(pool)


def test_forgetting_a_writer_drops_its_keys_and_those_of_the_blocks_that_build_on_them() -> None:
    pool = BlockPool(9)
    bad = _keyed(pool, [A, B], writer=1)
    heir = pool.allocate(1, writer=2)
    pool.set_key(heir[0], C, parent=B, step=None)
    pool.release(heir)  # its writer has long gone
    other = _keyed(pool, [X], writer=3)
    assert pool.forget_written_by(range(1, 2)) == {*bad, *heir}
    assert pool.find_prefix([A, B, C], max_blocks=3) == []
    assert pool.find_prefix([X], max_blocks=1) == other
    assert sorted(pool.take_events().stored) == [X]
    check_pool(pool)


def test_forgetting_a_writer_names_its_blocks_without_a_key_too() -> None:
    pool = BlockPool(5)
    held = pool.allocate(2, writer=1)
    assert pool.forget_written_by(range(1, 2)) == set(held)
    pool.release(held)
    assert pool.forget_written_by(range(1, 2)) == set(), (
        "free and without a key: nobody can read them"
    )


def test_reset_forgets_all_keys_but_not_while_a_block_is_held() -> None:
    pool = BlockPool(5)
    block_ids = _keyed(pool, [A, B])
    pool.take_events()
    assert not pool.reset()
    assert pool.find_prefix([A], max_blocks=1)
    pool.release(reversed(block_ids))
    assert pool.reset()
    assert pool.find_prefix([A], max_blocks=1) == []
    events = pool.take_events()
    assert events.cleared and events.stored == events.removed == []
    check_pool(pool)


def test_a_second_key_for_one_block_or_a_key_for_a_free_block_is_refused() -> None:
    pool = BlockPool(5)
    block_ids = _keyed(pool, [A])
    with pytest.raises(InvariantError, match="has a key already"):
        pool.set_key(block_ids[0], B, parent=ROOT, step=None)
    with pytest.raises(InvariantError, match="is free"):
        pool.set_key(4, B, parent=ROOT, step=None)


def test_a_pool_of_many_blocks_is_a_handful_of_objects_to_the_garbage_collector() -> None:
    import gc

    gc.collect()
    before = len(gc.get_objects())
    pool = BlockPool(100_000)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert pool.num_free == 99_999


def test_a_snapshot_is_one_piece_of_memory_that_holds_every_published_key_once() -> None:
    pool = BlockPool(1_001)
    keys = [number.to_bytes(16, "little") for number in range(1_000)]
    pool.release(_keyed(pool, keys))
    pool.allocate(400, writer=2)  # evicts as many
    packed = pool.published_keys()
    assert isinstance(packed, bytes) and len(packed) == 600 * 16
    assert {packed[start : start + 16] for start in range(0, len(packed), 16)} == set(keys[400:])
