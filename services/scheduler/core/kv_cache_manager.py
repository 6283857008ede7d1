"""Blocks for requests: slots for the tokens of a step, prefix hits, forks, and keys of full blocks.

Stands between the scheduler, which thinks in requests and tokens, and the block pool, which thinks
in block ids. Writes the block fields of ``Request`` (and nothing else does).
"""

from __future__ import annotations

from services.common.block_hash import block_key
from services.common.errors import InvariantError
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.request import NEVER, Request, RequestStatus, life_id


class KVCacheManager:
    """The KV cache of one engine, as its requests see it.

    Args:
        num_blocks: The null block included.
        block_size: Tokens a block.
        enable_prefix_caching: Whether full blocks get keys. Choices fork with or without.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching

    # ---- prefix hits

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the longest cached prefix; nothing is touched yet.

        At most ``num_tokens - 1`` tokens, rounded down to blocks: the last token must be computed
        for its logits.
        """
        if not self._enable_prefix_caching or not request.reads_prefix_cache:
            return []
        max_blocks = (request.num_tokens - 1) // self._block_size
        self._extend_keys(request, max_blocks)
        return self.pool.find_prefix(request.block_keys, max_blocks=max_blocks)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens that ``get_computed_blocks`` would find."""
        return len(self.get_computed_blocks(request)) * self._block_size

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        size = self._block_size
        if request.block_keys_of != (request.root_key, size):
            # Looked up or run by an engine with other weights or blocks before.
            request.block_keys_of = (request.root_key, size)
            request.block_keys.clear()
        keys = request.block_keys
        for index in range(len(keys), num_blocks):
            parent = keys[-1] if keys else request.root_key
            keys.append(block_key(parent, request.token_ids[index * size : (index + 1) * size]))

    # ---- slots

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Reserve KV slots for the next ``num_tokens`` of a running request.

        Blocks already held are filled first; the block table only ever grows.

        Args:
            request: Its first ``num_computed_tokens`` already have slots.
            num_tokens: Tokens of this step; > 0.

        Returns:
            The newly taken blocks, perhaps none; None if the pool is short (the caller preempts).

        Raises:
            InvariantError: The request is finished.
        """
        if request.status is RequestStatus.FINISHED:
            raise InvariantError(f"request {request.handle} is finished and cannot hold blocks")
        missing = self._num_missing_blocks(request, request.num_computed_tokens + num_tokens)
        if missing > self.pool.num_free:
            return None
        return self._grow(request, missing)

    def admit(self, request: Request, hits: list[int], *, num_tokens: int) -> bool:
        """Give a waiting request its hits and slots for its first step, if all of it fits now.

        All: blocks for every token that is known, not only for this step's, so that long prompts do
        not enter on credit and preempt one another half way.

        Args:
            request: Holds nothing, or what ``fork`` gave it (then ``hits`` is empty).
            hits: From ``get_computed_blocks``, in this step.
            num_tokens: Tokens of this step, after the hits.

        Returns:
            False if the pool is short; then nothing has changed.
        """
        held = [*request.block_ids, *hits]
        whole = self._num_blocks(request.num_tokens) - len(held)
        # A hit that nobody holds is on the free list; touching it consumes capacity.
        if whole + self.pool.num_free_among(hits) > self.pool.num_free:
            return False
        self.pool.touch(hits)
        self._take_over(request, held)
        request.num_computed_tokens = len(held) * self._block_size
        missing = self._num_missing_blocks(request, request.num_computed_tokens + num_tokens)
        self._grow(request, missing)
        return True

    def fork(self, parent: Request, child: Request) -> None:
        """Let a waiting choice hold the full blocks of its sibling's prompt.

        Args:
            parent: Its prompt is computed, or is by the step now being planned.
            child: Holds no blocks; the same prompt.
        """
        num_blocks = min(parent.num_prompt_tokens, child.num_tokens - 1) // self._block_size
        shared = parent.block_ids[:num_blocks]
        self.pool.touch(shared)
        self._take_over(child, shared)

    def free(self, request: Request) -> None:
        """Let go of all blocks of a request."""
        # Reversed: the tail of a prefix must be evicted before its head.
        self.pool.release(reversed(request.block_ids))
        self._take_over(request, [])

    def _take_over(self, request: Request, block_ids: list[int]) -> None:
        request.block_ids = block_ids
        request.num_slots = len(block_ids) * self._block_size
        self._note_keyed(request, len(block_ids))

    def _grow(self, request: Request, count: int) -> list[int]:
        new_block_ids = self.pool.allocate(
            count, writer=life_id(request.handle, request.generation)
        )
        request.block_ids += new_block_ids
        request.num_slots += count * self._block_size
        return new_block_ids

    def _num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        return max(0, self._num_blocks(num_tokens) - len(request.block_ids))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # ---- keys of full blocks

    def cache_full_blocks(self, request: Request, num_tokens: int, *, step: int | None) -> None:
        """Enter the keys of the blocks that the first ``num_tokens`` fill.

        Call it when ``num_tokens`` has reached ``request.next_key_at``.

        Args:
            request: Running; its first ``num_tokens`` tokens are known.
            num_tokens: Tokens whose KV exists, or does once ``step`` has run.
            step: The step being planned: the keys stay tentative until it is applied. None: the KV
                is there.
        """
        num_full = num_tokens // self._block_size
        self._extend_keys(request, num_full)
        keys = request.block_keys
        for index in range(request.num_keyed_blocks, num_full):
            parent = keys[index - 1] if index else request.root_key
            self.pool.set_key(request.block_ids[index], keys[index], parent=parent, step=step)
        self._note_keyed(request, num_full)

    def _note_keyed(self, request: Request, num_blocks: int) -> None:
        request.num_keyed_blocks = num_blocks
        if self._enable_prefix_caching:
            request.next_key_at = (num_blocks + 1) * self._block_size
        else:
            request.next_key_at = NEVER
