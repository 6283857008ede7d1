"""Where a request should run."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.common.placement import Place, choose_place, cost_s, queue_s

PLACES = st.builds(
    Place,
    place_id=st.integers(1, 1000),
    cached_tokens=st.integers(0, 500),
    waiting_uncached_tokens=st.integers(0, 10_000),
    num_running=st.integers(0, 64),
    num_waiting=st.integers(0, 64),
    prefill_tok_s=st.floats(0, 10_000),
    decode_tok_s=st.floats(0, 10_000),
    max_running=st.integers(0, 64),
    mean_service_s=st.floats(0, 60),
)


def test_the_cost_is_the_queue_plus_the_uncached_part_of_the_prompt() -> None:
    place = Place(1, cached_tokens=400, waiting_uncached_tokens=500, prefill_tok_s=1000.0)
    assert queue_s(place) == 0.5
    assert cost_s(place, num_tokens=1400) == 1.5


def test_a_cached_prefix_wins_until_its_queue_costs_more() -> None:
    warm = Place(1, cached_tokens=1000, waiting_uncached_tokens=500, prefill_tok_s=1000.0)
    cold = Place(2, prefill_tok_s=1000.0)
    assert choose_place([warm, cold], num_tokens=1100).place_id == 1
    busy = Place(1, cached_tokens=1000, waiting_uncached_tokens=1500, prefill_tok_s=1000.0)
    assert choose_place([busy, cold], num_tokens=1100).place_id == 2


def test_of_equal_places_the_one_with_fewer_requests_is_chosen() -> None:
    places = [Place(1, num_running=3), Place(2, num_running=1), Place(3, num_running=2)]
    assert choose_place(places, num_tokens=10).place_id == 2


def test_a_full_batch_costs_the_time_until_a_seat_is_free() -> None:
    full = Place(1, num_running=4, max_running=4, mean_service_s=8.0)
    assert queue_s(full) == 2.0
    free = Place(2, num_running=3, max_running=4, mean_service_s=8.0)
    assert queue_s(free) == 0.0


@given(st.lists(PLACES, min_size=1, max_size=6), st.integers(1, 4000))
def test_the_chosen_place_is_never_dearer_than_another(
    places: list[Place], num_tokens: int
) -> None:
    choice = choose_place(places, num_tokens=num_tokens)
    chosen = min(
        cost
        for place, cost in zip(places, choice.costs_s, strict=True)
        if place.place_id == choice.place_id
    )
    assert chosen <= min(choice.costs_s) + 1e-6


@given(PLACES, st.integers(1, 4000), st.integers(0, 500))
def test_more_cached_tokens_never_cost_more(place: Place, num_tokens: int, extra: int) -> None:
    warmer = replace(place, cached_tokens=place.cached_tokens + extra)
    assert cost_s(warmer, num_tokens=num_tokens) <= cost_s(place, num_tokens=num_tokens)
