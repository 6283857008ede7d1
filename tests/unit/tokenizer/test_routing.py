"""Which scheduler a request goes to, and when none will do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.common.errors import Unavailable
from services.common.placement import Place
from services.tokenizer.routing import Engine, Route, Router, usable
from services.tokenizer.tokens import Prediction


class Index:
    """A KV index that remembers what it was asked."""

    def __init__(self, blocks: dict[int, int] | None = None) -> None:
        self._blocks = blocks or {}
        self.num_keys: list[int] = []

    async def match(self, keys: Sequence[bytes], *, model: str, text_fp: str) -> dict[int, int]:
        self.num_keys.append(len(keys))
        return self._blocks


def engine(number: int, *, text_fp: str = "fp", is_ready: bool = True, waiting: int = 0) -> Engine:
    return Engine(
        scheduler=f"scheduler-{number}",
        text_fp=text_fp,
        is_ready=is_ready,
        max_model_len=100,
        revision="r",
        block_size=4,
        place=Place(number, waiting_uncached_tokens=waiting, prefill_tok_s=1000),
    )


def router(index: Index) -> Router:
    return Router(index, model="m", text_fp="fp")


def test_an_engine_with_other_text_is_never_used_and_both_values_are_named() -> None:
    with pytest.raises(Unavailable, match=r"fp-mine.*fp-theirs"):
        usable([engine(1, text_fp="fp-theirs")], text_fp="fp-mine")
    good = engine(2)
    assert usable([engine(1, text_fp="other"), good], text_fp="fp") == [good]


def test_without_an_engine_that_is_ready_the_reason_says_so() -> None:
    with pytest.raises(Unavailable, match="no worker is attached"):
        usable([], text_fp="fp")
    with pytest.raises(Unavailable, match="no worker is ready"):
        usable([engine(1, is_ready=False)], text_fp="fp")


async def test_with_one_candidate_the_index_is_not_asked() -> None:
    index = Index()
    route = await router(index).route([engine(1)], list(range(40)), cache_namespace="")
    assert route == Route("scheduler-1")
    assert index.num_keys == []


async def test_a_prompt_under_two_blocks_is_not_looked_up() -> None:
    index = Index()
    await router(index).route([engine(1), engine(2)], [1] * 7, cache_namespace="")
    assert index.num_keys == []


async def test_the_engine_that_holds_the_prompt_is_chosen_and_predicted() -> None:
    index = Index({2: 5})
    route = await router(index).route([engine(1), engine(2)], [1] * 40, cache_namespace="")
    assert route.scheduler == "scheduler-2"
    assert route.prediction == Prediction(2, 20, 0.0)
    assert index.num_keys == [10]


async def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    index = Index({2: 5})
    candidates = [engine(1), engine(2, waiting=500)]
    route = await router(index).route(candidates, [1] * 40, cache_namespace="")
    assert route.scheduler == "scheduler-1"


async def test_what_was_sent_a_moment_ago_counts_until_it_is_admitted() -> None:
    made = router(Index())
    candidates = [engine(1), engine(2)]
    first = await made.route(candidates, [1] * 40, cache_namespace="")
    with made.booked(first, num_tokens=40) as booking:
        second = await made.route(candidates, [1] * 40, cache_namespace="")
        assert second.scheduler != first.scheduler
        booking.release()
        assert await made.route(candidates, [1] * 40, cache_namespace="") == first
    assert await made.route(candidates, [1] * 40, cache_namespace="") == first
