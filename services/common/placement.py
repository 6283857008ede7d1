"""Where a request should run: one pure function for both levels of placement.

The cost of a place is the time until a request would give its first token there: what waits before
it, one step of what runs, and the part of its own prompt that the place has not cached. The
tokenizer uses it with guesses (an index match, loads that are up to half a second old), the
scheduler with exact values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ASSUMED_PREFILL_TOK_S = 1_000.0
"""Prefill speed of a place that has not been measured; all such places count alike."""


@dataclass(frozen=True, slots=True)
class Place:
    """A candidate for a request.

    Attributes:
        place_id: engine_id, or any other number that names the place.
        cached_tokens: Tokens of the prompt whose KV the place holds.
        waiting_uncached_tokens: Tokens that must be prefilled there before the request's own.
        num_running: Requests that decode there.
        num_waiting: Requests that wait there.
        prefill_tok_s: Measured prefill speed; 0 = not measured yet.
        decode_tok_s: Measured decode speed over all requests; 0 = not measured yet.
        max_running: Most requests that run there at once; 0 = unknown.
        mean_service_s: How long a request runs on average; 0 = unknown.
    """

    place_id: int
    cached_tokens: int = 0
    waiting_uncached_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    max_running: int = 0
    mean_service_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and what every candidate would have cost.

    Attributes:
        place_id: The cheapest place.
        wait_s: Its queue: the predicted time until the request is scheduled there.
        costs_s: Per candidate, in the order given.
    """

    place_id: int
    wait_s: float
    costs_s: tuple[float, ...]


def queue_s(place: Place) -> float:
    """Predicted time until a new request would be scheduled at a place, in seconds."""
    prefill = place.waiting_uncached_tokens / (place.prefill_tok_s or ASSUMED_PREFILL_TOK_S)
    step = place.num_running / place.decode_tok_s if place.decode_tok_s else 0.0
    return prefill + step + _slot_wait_s(place)


def cost_s(place: Place, *, num_tokens: int) -> float:
    """Predicted time until the first token of a request of ``num_tokens`` tokens, in seconds."""
    uncached = max(num_tokens - place.cached_tokens, 1)
    return queue_s(place) + uncached / (place.prefill_tok_s or ASSUMED_PREFILL_TOK_S)


def choose_place(places: Sequence[Place], *, num_tokens: int) -> Choice:
    """The cheapest place; of equals the one with fewer requests, then the smaller id.

    Args:
        places: At least one.
        num_tokens: Tokens to be prefilled, resumed output included.
    """
    costs = tuple(cost_s(place, num_tokens=num_tokens) for place in places)
    best = min(
        range(len(places)),
        key=lambda i: (
            round(costs[i], 6),
            places[i].num_running + places[i].num_waiting,
            places[i].place_id,
        ),
    )
    return Choice(places[best].place_id, queue_s(places[best]), costs)


def _slot_wait_s(place: Place) -> float:
    """Time until one of the places in the batch is free for a request behind those that wait."""
    if not place.max_running or not place.mean_service_s:
        return 0.0
    ahead = place.num_running + place.num_waiting + 1 - place.max_running
    return max(ahead, 0) * place.mean_service_s / place.max_running
