"""The KV cache manager, one behaviour a test."""

from __future__ import annotations

import pytest

from services.common.block_hash import block_keys, root_key
from services.common.errors import InvariantError
from services.common.sampling import SamplingParams
from services.scheduler.core.kv_cache_manager import KVCacheManager
from services.scheduler.core.request import Request, RequestStatus
from tests.unit.scheduler.core.invariants import check_pool

ROOT = root_key("weights")


def _manager(num_blocks: int = 9, *, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, enable_prefix_caching=caching)


def _request(handle: int, prompt_ids: list[int], **fields: object) -> Request:
    return Request(
        handle=handle,
        request_id=str(handle),
        prompt_ids=prompt_ids,
        root_key=fields.pop("root_key", ROOT),  # type: ignore[arg-type]
        arrival_s=0.0,
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
    )


def _run(manager: KVCacheManager, request: Request) -> None:
    """Admit a request and compute its whole prompt."""
    hits = manager.get_computed_blocks(request)
    num_tokens = request.num_tokens - len(hits) * 4
    assert manager.admit(request, hits, num_tokens=num_tokens)
    request.num_computed_tokens += num_tokens
    if request.num_tokens >= request.next_key_at:
        manager.cache_full_blocks(request, request.num_tokens, step=None)


def test_blocks_already_held_are_filled_first_and_the_table_only_grows() -> None:
    manager = _manager()
    request = _request(1, [1, 2, 3])
    assert manager.admit(request, [], num_tokens=3)
    request.num_computed_tokens = 3
    assert manager.allocate_slots(request, 1) == []
    request.num_computed_tokens = 4
    assert manager.allocate_slots(request, 5) == [2, 3]
    assert request.block_ids == [1, 2, 3] and request.num_slots == 12


def test_a_short_pool_gives_none_and_changes_nothing() -> None:
    manager = _manager(num_blocks=3)
    request = _request(1, [1, 2, 3, 4])
    assert manager.admit(request, [], num_tokens=4)
    assert manager.allocate_slots(request, 9) is None
    assert manager.pool.num_free == 1 or request.block_ids == [1]
    check_pool(manager.pool)


def test_slots_for_a_finished_request_are_refused() -> None:
    manager = _manager()
    request = _request(1, [1])
    request.become(RequestStatus.FINISHED)
    with pytest.raises(InvariantError, match="finished"):
        manager.allocate_slots(request, 1)


def test_a_hit_is_rounded_down_to_blocks_and_leaves_at_least_one_token() -> None:
    manager = _manager()
    _run(manager, _request(1, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert len(manager.get_computed_blocks(_request(2, [1, 2, 3, 4, 5, 6, 7, 8]))) == 1
    assert len(manager.get_computed_blocks(_request(3, [1, 2, 3, 4, 5, 6, 7, 8, 9]))) == 2
    assert len(manager.get_computed_blocks(_request(4, [1, 2, 3, 4, 5, 6, 7, 9, 9]))) == 1
    assert manager.get_computed_blocks(_request(5, [9, 2, 3, 4, 5])) == []


def test_another_namespace_never_hits() -> None:
    manager = _manager()
    _run(manager, _request(1, [1, 2, 3, 4, 5]))
    other = root_key("weights", cache_namespace="tenant")
    assert manager.get_computed_blocks(_request(2, [1, 2, 3, 4, 5], root_key=other)) == []


def test_a_request_looked_up_by_another_engine_before_gets_its_keys_anew() -> None:
    manager = _manager()
    _run(manager, _request(1, [1, 2, 3, 4, 5]))
    request = _request(2, [1, 2, 3, 4, 5], root_key=root_key("other weights"))
    assert manager.num_cached_tokens(request) == 0
    request.root_key = ROOT
    assert manager.num_cached_tokens(request) == 4


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it() -> None:
    manager = _manager()
    _run(manager, _request(1, [1, 2, 3, 4, 5], prompt_logprobs=0))
    _run(manager, again := _request(2, [1, 2, 3, 4, 5], prompt_logprobs=0))
    assert again.block_ids == [3, 4], "computed for itself"
    assert len(manager.get_computed_blocks(_request(3, [1, 2, 3, 4, 5]))) == 1


def test_admission_needs_room_for_all_known_tokens_not_only_for_this_step() -> None:
    manager = _manager(num_blocks=4)
    assert not manager.admit(_request(1, list(range(13))), [], num_tokens=1)
    assert manager.pool.num_free == 3
    assert manager.admit(_request(2, list(range(12))), [], num_tokens=1)
    assert manager.pool.num_free == 2


def test_a_hit_that_nobody_holds_counts_as_consumption() -> None:
    manager = _manager(num_blocks=5)
    _run(manager, first := _request(1, [1, 2, 3, 4, 5]))
    manager.free(first)
    manager.pool.allocate(2, writer=9)  # two are left, one of them the hit
    request = _request(2, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    hits = manager.get_computed_blocks(request)
    assert len(hits) == 1
    assert not manager.admit(request, hits, num_tokens=5), "the hit and two more are not there"
    assert manager.pool.num_free == 2 and request.block_ids == []
    shorter = _request(3, [1, 2, 3, 4, 5, 6])
    assert manager.admit(shorter, manager.get_computed_blocks(shorter), num_tokens=2)
    check_pool(manager.pool)


def test_a_hit_is_not_evicted_for_the_blocks_that_come_with_it() -> None:
    manager = _manager(num_blocks=4)
    _run(manager, first := _request(1, [1, 2, 3, 4, 5]))
    manager.free(first)
    request = _request(2, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.admit(request, manager.get_computed_blocks(request), num_tokens=5)
    assert request.block_ids[0] == 1 and len(set(request.block_ids)) == 3


def test_freeing_in_reverse_evicts_the_tail_of_a_prefix_before_its_head() -> None:
    manager = _manager(num_blocks=4)
    _run(manager, first := _request(1, list(range(12))))
    manager.free(first)
    manager.pool.allocate(1, writer=9)
    longer = _request(2, list(range(13)))
    assert len(manager.get_computed_blocks(longer)) == 2


def test_output_blocks_are_keyed_so_that_the_next_turn_of_a_chat_hits() -> None:
    manager = _manager()
    request = _request(1, [1, 2, 3])
    _run(manager, request)
    for token_id in (4, 5, 6, 7, 8, 9):
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        request.append_token(token_id, now=0.0)
        if request.num_tokens > request.next_key_at:
            manager.cache_full_blocks(request, request.num_tokens - 1, step=None)
    manager.free(request)
    turn = _request(2, [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 51])
    assert manager.num_cached_tokens(turn) == 8
    assert turn.block_keys == block_keys(ROOT, turn.token_ids, block_size=4)


@pytest.mark.parametrize("caching", [True, False])
def test_a_choice_forks_the_full_blocks_of_the_prompt_whatever_the_cache_setting(
    caching: bool,
) -> None:
    manager = _manager(caching=caching)
    _run(manager, leader := _request(1, [1, 2, 3, 4, 5, 6]))
    follower = _request(2, [1, 2, 3, 4, 5, 6])
    manager.fork(leader, follower)
    assert follower.block_ids == leader.block_ids[:1]
    assert manager.admit(follower, [], num_tokens=2)
    assert follower.block_ids[1] != leader.block_ids[1], "the last block is written by both"
    assert follower.num_computed_tokens == 4
    manager.free(leader)
    manager.free(follower)
    assert manager.pool.num_used == 0
    check_pool(manager.pool)


def test_a_fork_of_a_prompt_that_ends_with_a_block_computes_its_last_block_itself() -> None:
    manager = _manager()
    _run(manager, leader := _request(1, [1, 2, 3, 4, 5, 6, 7, 8]))
    follower = _request(2, [1, 2, 3, 4, 5, 6, 7, 8])
    manager.fork(leader, follower)
    assert follower.block_ids == leader.block_ids[:1]
