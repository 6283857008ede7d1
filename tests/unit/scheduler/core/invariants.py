"""What must hold after every operation on the block pool and on the scheduler. Looks inside."""

from __future__ import annotations

from collections import Counter

from services.scheduler.core.block_pool import NULL_BLOCK_ID, BlockPool
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.scheduler import EngineLimits, Scheduler


def check_pool(pool: BlockPool) -> None:
    """Free list, rings, map and published counts agree with one another."""
    free = _free_list(pool)
    assert len(free) == len(set(free)) == pool.num_free
    assert NULL_BLOCK_ID not in free
    num_blocks = pool.num_usable + 1
    for block_id in range(1, num_blocks):
        assert (pool._ref_counts[block_id] == 0) == (block_id in set(free))
    assert pool._ref_counts[NULL_BLOCK_ID] == 0 and pool._keys[NULL_BLOCK_ID] is None
    _check_keys(pool, num_blocks)


def _free_list(pool: BlockPool) -> list[int]:
    forward, block_id = [], pool._next_free[NULL_BLOCK_ID]
    while block_id != NULL_BLOCK_ID:
        forward.append(block_id)
        assert len(forward) <= pool.num_usable, "the free list runs in a circle"
        block_id = pool._next_free[block_id]
    backward, block_id = [], pool._prev_free[NULL_BLOCK_ID]
    while block_id != NULL_BLOCK_ID:
        backward.append(block_id)
        block_id = pool._prev_free[block_id]
    assert backward == forward[::-1]
    return forward


def free_list(pool: BlockPool) -> list[int]:
    """Block ids from the next to evict to the last."""
    return _free_list(pool)


def _check_keys(pool: BlockPool, num_blocks: int) -> None:
    copies: dict[bytes, set[int]] = {}
    for block_id in range(num_blocks):
        key = pool._keys[block_id]
        if key is not None:
            copies.setdefault(key, set()).add(block_id)
    assert copies.keys() == pool._block_by_key.keys()
    for key, block_ids in copies.items():
        ring, block_id = [], pool._block_by_key[key]
        while block_id not in ring:
            ring.append(block_id)
            assert pool._prev_copy[pool._next_copy[block_id]] == block_id
            block_id = pool._next_copy[block_id]
        assert set(ring) == block_ids
    published = Counter(
        key
        for block_id in range(num_blocks)
        if (key := pool._keys[block_id]) is not None and not pool._tentative_steps[block_id]
    )
    assert published == Counter(pool._published.num_copies())
    for block_id in range(num_blocks):
        if pool._tentative_steps[block_id]:
            assert block_id in pool._tentative[pool._tentative_steps[block_id]]


def check_scheduler(scheduler: Scheduler, limits: EngineLimits) -> None:
    """Nothing is leaked, shared wrongly or in two places; limits hold."""
    table, pool = scheduler._table, scheduler._kv.pool
    check_pool(pool)
    requests = list(table.by_handle.values())
    held = Counter(block_id for request in requests for block_id in request.block_ids)
    for block_id in range(1, limits.num_blocks):
        assert pool.ref_count(block_id) == held[block_id], f"block {block_id}"
    assert len(table.running) <= limits.max_num_seqs
    assert scheduler.num_in_flight <= limits.pipeline_depth
    _check_places(scheduler, requests)
    for request in requests:
        _check_request(request, limits)
    _check_sharing(requests, limits)


def _check_places(scheduler: Scheduler, requests: list[Request]) -> None:
    table = scheduler._table
    for queue in (table.running, table.waiting):
        ranks = [request.rank for request in queue]
        assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)
        assert all(request in requests for request in queue)
    for request in requests:
        is_running = request.status is RequestStatus.RUNNING
        assert (request in table.running.requests) == is_running
        assert (request in table.waiting.requests) == request.is_queued
        if request.is_follower:
            assert request.fork_group is not None
            assert request in request.fork_group.followers and not request.block_ids
            assert request.fork_group.leader in requests, "nobody computes the prompt"
        if request.block_ids:
            assert is_running or request.handle in table._forked
    assert table.waiting.num_uncached_tokens == sum(r.num_uncached_tokens for r in table.waiting)


def _check_request(request: Request, limits: EngineLimits) -> None:
    assert request.num_tokens == len(request.token_ids)
    assert request.num_slots == len(request.block_ids) * limits.block_size
    assert request.num_computed_tokens <= request.num_planned_tokens <= request.max_total_tokens
    assert request.num_tokens <= request.num_planned_tokens
    assert request.num_planned_tokens - request.num_tokens <= limits.pipeline_depth
    if request.status is RequestStatus.RUNNING:
        assert request.num_computed_tokens <= request.num_slots
    else:
        assert request.num_computed_tokens == 0
        assert request.num_planned_tokens == request.num_tokens


def _check_sharing(requests: list[Request], limits: EngineLimits) -> None:
    """A block with two holders is full, and holds the same prefix of both."""
    owners: dict[int, tuple[int, list[int], bytes]] = {}
    for request in requests:
        for index, block_id in enumerate(request.block_ids):
            end = (index + 1) * limits.block_size
            mine = (index, request.token_ids[:end], request.root_key)
            if block_id in owners:
                assert len(mine[1]) == end, "a block that is not full is shared"
                assert owners[block_id] == mine
            owners[block_id] = mine
