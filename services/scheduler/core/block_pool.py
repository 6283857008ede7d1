"""The blocks of one engine's KV cache: who uses them, which are free, and what the full ones hold.

A block is a number; everything about it lies in arrays indexed by that number, so a pool of a
million blocks is a dozen objects to the garbage collector. All operations are O(1) a block, but for
the two that clean up after a failure.

Block 0 is the null block: never given out, never keyed. The arrays use it as the sentinel of the
free list, a circular doubly linked list from the next block to evict to the last.

A free block keeps its key until it is taken for something else: the free list *is* the prefix
cache, in least-recently-used order. One key may live in several blocks, because a block id never
changes under a request; copies of one key form a ring.

A key entered while its block is still to be filled by a step in flight is *tentative*: it can be
hit (steps run in order, and each layer writes its KV before it reads), but it is not published
until ``confirm`` says that the step was good.

Knows neither requests nor steps beyond their numbers. Design after "PagedAttention" (Kwon et al.
2023) and vLLM V1's block pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from services.common.errors import InvariantError
from services.scheduler.core.output import KvEvents
from services.scheduler.core.published_keys import PublishedKeys

NULL_BLOCK_ID = 0
_CONFIRMED = 0  # the value of a block's tentative step once that step was good


class BlockPool:
    """Reference counts, LRU free list and prefix map over ``num_blocks`` blocks.

    Args:
        num_blocks: The null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self.num_free = num_blocks - 1
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._next_free = array("i", range(1, num_blocks + 1))
        self._prev_free = array("i", range(-1, num_blocks - 1))
        self._next_free[-1], self._prev_free[0] = NULL_BLOCK_ID, num_blocks - 1
        self._writers = array("q", bytes(8 * num_blocks))
        self._keys: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes | None] = [None] * num_blocks
        self._tentative_steps = array("q", bytes(8 * num_blocks))
        # Rings of the blocks that share a key; a block alone is its own neighbour.
        self._next_copy = array("i", range(num_blocks))
        self._prev_copy = array("i", range(num_blocks))
        self._block_by_key: dict[bytes, int] = {}
        self._tentative: dict[int, list[int]] = {}
        self._published = PublishedKeys()
        self._events: dict[bytes, bool] = {}  # key -> stored (true) or removed, since the last take
        self._is_cleared = False

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_usable - self.num_free

    def ref_count(self, block_id: int) -> int:
        """How many requests hold a block."""
        return self._ref_counts[block_id]

    # ---- taking and giving back

    def allocate(self, count: int, *, writer: int) -> list[int]:
        """Take the blocks that were unused longest; what they held is forgotten.

        Args:
            count: How many; at most ``num_free``.
            writer: Names who will fill them (``life_id``).

        Raises:
            InvariantError: There are not so many; the caller checks first.
        """
        if count > self.num_free:
            raise InvariantError(f"{count} blocks wanted, {self.num_free} free")
        block_ids = []
        block_id = self._next_free[NULL_BLOCK_ID]
        for _ in range(count):
            block_ids.append(block_id)
            if self._keys[block_id] is not None:
                self._drop_key(block_id)
            self._ref_counts[block_id] = 1
            self._writers[block_id] = writer
            block_id = self._next_free[block_id]
        self._next_free[NULL_BLOCK_ID] = block_id
        self._prev_free[block_id] = NULL_BLOCK_ID
        self.num_free -= count
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that a lookup has found; free ones leave the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Let go of blocks, in the order in which they may be evicted.

        A block without a key is useless to others and is the next to be taken; one with a key is
        the last. Pass a block table in reverse: the tail of a prefix must be evicted before its
        head.

        Raises:
            InvariantError: Nobody holds one of them.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] <= 0:
                raise InvariantError(f"block {block_id} is freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._keys[block_id] is None:
                    self._link(block_id, after=NULL_BLOCK_ID)
                else:
                    self._link(block_id, after=self._prev_free[NULL_BLOCK_ID])

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks nobody holds: touching those uses up free blocks."""
        ref_counts = self._ref_counts
        return sum(1 for block_id in block_ids if ref_counts[block_id] == 0)

    def has_sole_holder(self, block_ids: Iterable[int]) -> bool:
        """Whether letting go of these (held once by the caller) would free at least one."""
        return any(self._ref_counts[block_id] == 1 for block_id in block_ids)

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev_free[block_id], self._next_free[block_id]
        self._next_free[before] = after
        self._prev_free[after] = before
        self.num_free -= 1

    def _link(self, block_id: int, *, after: int) -> None:
        before, behind = after, self._next_free[after]
        self._prev_free[block_id] = before
        self._next_free[block_id] = behind
        self._next_free[before] = block_id
        self._prev_free[behind] = block_id
        self.num_free += 1

    # ---- keys

    def find_prefix(self, keys: Sequence[bytes], *, max_blocks: int) -> list[int]:
        """Blocks that hold the longest known prefix of a chain of keys; any copy of each.

        Args:
            keys: Chained keys of full blocks, from the first.
            max_blocks: Look no further.
        """
        found: list[int] = []
        for index in range(min(len(keys), max_blocks)):
            block_id = self._block_by_key.get(keys[index])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def set_key(self, block_id: int, key: bytes, *, parent: bytes, step: int | None) -> None:
        """Say what a held block holds, so that it can be hit.

        Args:
            block_id: Full, or to be full once ``step`` has run.
            key: Its key.
            parent: Key of the block before (the root key for the first).
            step: The step in flight that fills it: tentative until then. None = it is full.

        Raises:
            InvariantError: Nobody holds the block, or it has a key.
        """
        if self._ref_counts[block_id] <= 0 or self._keys[block_id] is not None:
            raise InvariantError(f"block {block_id} is free or has a key already")
        self._keys[block_id] = key
        self._parents[block_id] = parent
        first = self._block_by_key.setdefault(key, block_id)
        if first != block_id:
            self._join_ring(block_id, neighbour=first)
        if step is None:
            self._publish(key)
        else:
            self._tentative_steps[block_id] = step
            self._tentative.setdefault(step, []).append(block_id)

    def confirm(self, step: int) -> None:
        """A step was good: the keys that waited for it are published."""
        for block_id in self._tentative.pop(step, ()):
            if self._tentative_steps[block_id] != step:
                continue  # evicted or forgotten since
            self._tentative_steps[block_id] = _CONFIRMED
            key = self._keys[block_id]
            assert key is not None
            self._publish(key)

    def _join_ring(self, block_id: int, *, neighbour: int) -> None:
        behind = self._next_copy[neighbour]
        self._next_copy[neighbour] = block_id
        self._prev_copy[block_id] = neighbour
        self._next_copy[block_id] = behind
        self._prev_copy[behind] = block_id

    def _leave_ring(self, block_id: int, key: bytes) -> None:
        behind = self._next_copy[block_id]
        if behind == block_id:
            del self._block_by_key[key]
            return
        before = self._prev_copy[block_id]
        self._next_copy[before] = behind
        self._prev_copy[behind] = before
        self._next_copy[block_id] = self._prev_copy[block_id] = block_id
        self._block_by_key[key] = behind

    def _drop_key(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        self._leave_ring(block_id, key)
        self._keys[block_id] = self._parents[block_id] = None
        if self._tentative_steps[block_id] == _CONFIRMED:
            self._retract(key)
        self._tentative_steps[block_id] = _CONFIRMED

    # ---- after a failure

    def drop_tentative(self) -> None:
        """A step failed: no key of a step in flight can be trusted."""
        for step, block_ids in self._tentative.items():
            for block_id in block_ids:
                if self._tentative_steps[block_id] == step:
                    self._drop_key(block_id)
        self._tentative.clear()

    def writer_of(self, block_id: int) -> int:
        """Who has taken the block last, as given to ``allocate``."""
        return self._writers[block_id]

    def forget_written_by(self, writers: range) -> set[int]:
        """A row went wrong: drop the keys of all blocks that it wrote, and of all that build on
        them.

        Walks the whole pool; meant for rare events.

        Args:
            writers: As given to ``allocate``.

        Returns:
            The blocks concerned, also those without a key; whoever holds one has wrong KV.
        """
        bad = list(self._written_by(writers))
        children = self._children_by_key() if any(self._keys[block] for block in bad) else {}
        seen = set(bad)
        while bad:
            block_id = bad.pop()
            key = self._keys[block_id]
            if key is None:
                continue
            self._drop_key(block_id)
            heirs = [child for child in children.get(key, ()) if child not in seen]
            seen.update(heirs)
            bad.extend(heirs)
        return seen

    def _written_by(self, writers: range) -> Iterable[int]:
        """Blocks that they filled and that somebody holds or may find, from the lowest id."""
        for block_id, writer in enumerate(self._writers):
            if writer in writers and (
                self._ref_counts[block_id] or self._keys[block_id] is not None
            ):
                yield block_id

    def _children_by_key(self) -> dict[bytes, list[int]]:
        children: dict[bytes, list[int]] = {}
        for block_id, parent in enumerate(self._parents):
            if parent is not None:
                children.setdefault(parent, []).append(block_id)
        return children

    def reset(self) -> bool:
        """Forget all keys; false, and nothing is done, while a block is held."""
        if self.num_used:
            return False
        for block_id, key in enumerate(self._keys):
            if key is not None:
                self._drop_key(block_id)
        self._tentative.clear()
        self._events.clear()
        self._is_cleared = True
        return True

    # ---- events

    def _publish(self, key: bytes) -> None:
        if self._published.add(key):
            self._note(key, is_stored=True)

    def _retract(self, key: bytes) -> None:
        if self._published.remove(key):
            self._note(key, is_stored=False)

    def _note(self, key: bytes, *, is_stored: bool) -> None:
        if self._events.get(key, is_stored) != is_stored:
            del self._events[key]  # undoes what nobody has been told yet
        else:
            self._events[key] = is_stored

    def take_events(self) -> KvEvents:
        """Net changes of the published keys since the last call; they need no order among them."""
        events = KvEvents(
            stored=[key for key, is_stored in self._events.items() if is_stored],
            removed=[key for key, is_stored in self._events.items() if not is_stored],
            cleared=self._is_cleared,
        )
        self._events.clear()
        self._is_cleared = False
        return events

    def published_keys(self) -> bytes:
        """All keys that the events so far amount to, 16 bytes each, for a snapshot."""
        return self._published.packed()
