"""The block pool against a model that does everything the slow way."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.block_pool import BlockPool
from tests.unit.scheduler.core.invariants import check_pool, free_list

NUM_BLOCKS = 9
KEYS = [bytes([65 + index]) * 16 for index in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Holders come and go; chains of keys are entered, hit, confirmed and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: dict[int, list[int]] = {}  # holder -> block ids
        self.keys: dict[int, bytes] = {}  # block id -> key
        self.parents: dict[int, bytes] = {}
        self.writers: dict[int, int] = {}
        self.tentative: dict[int, int] = {}  # block id -> step
        self.told: set[bytes] = set()  # what a reader of the events believes
        self.next_holder = 1
        self.next_step = 1

    def _forget(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.keys.pop(block_id, None)
            self.parents.pop(block_id, None)
            self.tentative.pop(block_id, None)

    @rule(count=st.integers(1, NUM_BLOCKS - 1))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        expected = free_list(self.pool)[:count]
        taken = self.pool.allocate(count, writer=self.next_holder)
        assert taken == expected
        self._forget(taken)
        self.writers.update(dict.fromkeys(taken, self.next_holder))
        self.tables[self.next_holder] = taken
        self.next_holder += 1

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    def hit(self, keys: list[bytes]) -> None:
        found = self.pool.find_prefix(keys, max_blocks=3)
        length = next((i for i, key in enumerate(keys) if key not in self.keys.values()), len(keys))
        assert len(found) == length
        assert [self.keys[block_id] for block_id in found] == keys[:length]
        if found:
            free_before = self.pool.num_free
            assert self.pool.num_free_among(found) == sum(
                all(block not in table for table in self.tables.values()) for block in found
            )
            self.pool.touch(found)
            assert self.pool.num_free <= free_before
            self.tables[self.next_holder] = found
            self.next_holder += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), key=st.sampled_from(KEYS), is_tentative=st.booleans())
    def enter_key(self, data: st.DataObject, key: bytes, is_tentative: bool) -> None:
        holder = data.draw(st.sampled_from(sorted(self.tables)))
        table = self.tables[holder]
        index = next((i for i, block in enumerate(table) if block not in self.keys), None)
        if index is None or table.count(table[index]) > 1:
            return
        parent = self.keys[table[index - 1]] if index else b"root"
        step = self.next_step if is_tentative else None
        self.pool.set_key(table[index], key, parent=parent, step=step)
        self.keys[table[index]] = key
        self.parents[table[index]] = parent
        if step is not None:
            self.tentative[table[index]] = step

    @rule(is_good=st.booleans())
    def end_of_step(self, is_good: bool) -> None:
        if is_good:
            self.pool.confirm(self.next_step)
            self.tentative = {b: s for b, s in self.tentative.items() if s != self.next_step}
            self.next_step += 1
        else:
            self.pool.drop_tentative()
            self._forget(list(self.tentative))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.release(reversed(self.tables.pop(holder)))

    @precondition(lambda self: self.next_holder > 1)
    @rule(data=st.data())
    def forget_writer(self, data: st.DataObject) -> None:
        writer = data.draw(st.integers(1, self.next_holder - 1))
        held = {block for table in self.tables.values() for block in table}
        bad = {
            block
            for block, name in self.writers.items()
            if name == writer and (block in self.keys or block in held)
        }
        grown = True
        while grown:
            bad_keys = {self.keys[block] for block in bad if block in self.keys}
            heirs = {block for block, parent in self.parents.items() if parent in bad_keys} - bad
            bad |= heirs
            grown = bool(heirs)
        assert self.pool.forget_written_by(range(writer, writer + 1)) == bad
        self._forget(list(bad))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.tables)
        if not self.tables:
            self._forget(list(self.keys))

    @rule()
    def read_events(self) -> None:
        events = self.pool.take_events()
        if events.cleared:
            self.told.clear()
        assert not self.told & set(events.stored)
        assert set(events.removed) <= self.told
        self.told = (self.told | set(events.stored)) - set(events.removed)
        confirmed = {key for block, key in self.keys.items() if block not in self.tentative}
        packed = self.pool.published_keys()
        published = [packed[start : start + 16] for start in range(0, len(packed), 16)]
        assert self.told == confirmed == set(published)
        assert len(published) == len(confirmed), "every key once"

    @invariant()
    def counts_are_right(self) -> None:
        check_pool(self.pool)
        for block_id in range(1, NUM_BLOCKS):
            holders = sum(table.count(block_id) for table in self.tables.values())
            assert self.pool.ref_count(block_id) == holders
            assert self.pool._keys[block_id] == self.keys.get(block_id)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
