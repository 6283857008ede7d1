"""Which scheduler a request goes to: one whose engines speak our tokens, and where it starts
soonest.

With one candidate there is nothing to ask. Otherwise the KV index says who holds how much of the
prompt, the engines' loads say how long they would let it wait, and what we have sent in the last
moments, which no load shows yet, is added to them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from services.common.block_hash import block_keys, root_key
from services.common.errors import Unavailable
from services.common.placement import Place, choose_place
from services.tokenizer.tokens import Prediction

MIN_BLOCKS_TO_ASK = 2


@dataclass(frozen=True, slots=True)
class Engine:
    """What routing must know of an engine.

    Attributes:
        scheduler: Address of the scheduler that drives it.
        is_ready: Whether it takes requests.
        revision: Weights revision, the first field of a block key's root.
        place: Its load; ``place_id`` is the engine_id.
    """

    scheduler: str
    text_fp: str
    is_ready: bool
    max_model_len: int
    revision: str
    block_size: int
    place: Place


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes; ``prediction`` is there if there was a choice."""

    scheduler: str
    prediction: Prediction | None = None


def usable(engines: Sequence[Engine], *, text_fp: str) -> list[Engine]:
    """Those engines that are ready and mean the same by a token as we do.

    Raises:
        Unavailable: There is none; the message says why, and names both fingerprints if they
            differ.
    """
    ready = [engine for engine in engines if engine.is_ready]
    matching = [engine for engine in ready if engine.text_fp == text_fp]
    if matching:
        return matching
    if ready:
        theirs = ", ".join(sorted({engine.text_fp for engine in ready}))
        raise Unavailable(
            f"no worker has this tokenizer's text fingerprint {text_fp}; the workers' is {theirs}: "
            "they must serve the same model directory",
            retry_after_s=5.0,
        )
    why = "no worker is ready yet" if engines else "no worker is attached"
    raise Unavailable(why, retry_after_s=1.0)


class KvIndex(Protocol):
    """Whoever knows which engine holds what (``kvstore_client.py``)."""

    async def match(self, keys: Sequence[bytes], *, model: str, text_fp: str) -> dict[int, int]:
        """engine_id → contiguous blocks that it holds, from the first; {} = no answer in time."""


class Router:
    """Chooses schedulers and remembers what it has sent to each engine that no load shows yet."""

    def __init__(self, kvstore: KvIndex, *, model: str, text_fp: str) -> None:
        """
        Args:
            kvstore: The KV index.
            model: Served name.
            text_fp: Our fingerprint.
        """
        self._kvstore = kvstore
        self._model = model
        self._text_fp = text_fp
        self._booked: Counter[int] = Counter()

    async def route(
        self, engines: Sequence[Engine], prompt_ids: Sequence[int], *, cache_namespace: str
    ) -> Route:
        """Choose a scheduler.

        Args:
            engines: Usable ones; at least one.
            prompt_ids: The prompt.
            cache_namespace: Requests of different namespaces share no blocks.
        """
        if len({engine.scheduler for engine in engines}) == 1:
            return Route(engines[0].scheduler)
        cached = await self._cached_tokens(engines, prompt_ids, cache_namespace=cache_namespace)
        places = [
            self._place_now(engine, cached.get(engine.place.place_id, 0)) for engine in engines
        ]
        choice = choose_place(places, num_tokens=len(prompt_ids))
        index = [place.place_id for place in places].index(choice.place_id)
        prediction = Prediction(choice.place_id, places[index].cached_tokens, choice.wait_s)
        return Route(engines[index].scheduler, prediction)

    @contextmanager
    def booked(self, route: Route, *, num_tokens: int) -> Iterator[Booking]:
        """Count a request against its engine until it is admitted or given up."""
        booking = Booking(self._booked, route, num_tokens=num_tokens)
        try:
            yield booking
        finally:
            booking.release()

    def _place_now(self, engine: Engine, cached_tokens: int) -> Place:
        booked = self._booked[engine.place.place_id]
        return replace(
            engine.place,
            cached_tokens=cached_tokens,
            waiting_uncached_tokens=engine.place.waiting_uncached_tokens + booked,
        )

    async def _cached_tokens(
        self, engines: Sequence[Engine], prompt_ids: Sequence[int], *, cache_namespace: str
    ) -> dict[int, int]:
        """engine_id → tokens of the prompt that the index believes it holds."""
        kinds = {(engine.revision, engine.block_size) for engine in engines}
        found: dict[int, int] = {}
        for answer in await asyncio.gather(
            *(
                self._ask(prompt_ids, revision, block_size, cache_namespace)
                for revision, block_size in kinds
                if block_size and len(prompt_ids) >= MIN_BLOCKS_TO_ASK * block_size
            )
        ):
            found |= answer
        return found

    async def _ask(
        self, prompt_ids: Sequence[int], revision: str, block_size: int, cache_namespace: str
    ) -> dict[int, int]:
        root = root_key(revision, cache_namespace=cache_namespace)
        keys = block_keys(root, prompt_ids, block_size=block_size)
        blocks = await self._kvstore.match(keys, model=self._model, text_fp=self._text_fp)
        return {engine_id: num_blocks * block_size for engine_id, num_blocks in blocks.items()}


class Booking:
    """Tokens that have been sent to an engine and that its load may not show yet."""

    def __init__(self, booked: Counter[int], route: Route, *, num_tokens: int) -> None:
        self._booked = booked
        self._engine_id = route.prediction.engine_id if route.prediction else 0
        cached_tokens = route.prediction.cached_tokens if route.prediction else 0
        self._num_tokens = num_tokens - cached_tokens
        booked[self._engine_id] += self._num_tokens

    def release(self) -> None:
        """The engine's own load shows the request from here on; releasing twice changes nothing."""
        self._booked[self._engine_id] -= self._num_tokens
        self._num_tokens = 0
        if not self._booked[self._engine_id]:
            del self._booked[self._engine_id]
