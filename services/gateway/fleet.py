"""What the gateway knows of the tokenizers and of the engines behind them.

Fed by the Info stream of each tokenizer (``tokenizer_client.py``), read by health, models, metrics
and by whoever chooses a tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from services.common.errors import ModelNotFound, Unavailable

STALE_AFTER_S = 5.0
"""A tokenizer that has been silent for so long does not count; it speaks at least once a second."""

PULSE_S = 0.5


class Phase(Enum):
    """Where an engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """State and cumulative counters of an engine, named as on the wire."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: a scheduler's core and its worker."""

    engine_id: int
    worker_id: str
    phase: Phase
    loading_phase: str = ""
    loading_fraction: float = 0.0
    num_blocks: int = 0
    block_size: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What a tokenizer last said."""

    model: str
    max_model_len: int = 0
    vocab_size: int = 0
    is_ready: bool = False
    not_ready_reason: str = ""
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request would succeed now, and if not, why.

    Attributes:
        phase: What is being waited for ("starting", "load weights").
        percent: 0..100 of that phase, where it is known.
    """

    is_ready: bool
    reason: str = ""
    phase: str = "ready"
    percent: int | None = None


class Pulse:
    """A clock that counts only the time in which this process had its turn.

    If this process was held up, its peers have not been silent: what they said waits to be read.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    async def run(self) -> None:
        """Count, until cancelled."""
        while True:
            await asyncio.sleep(PULSE_S)
            self.seconds += PULSE_S


class Fleet:
    """The last word of every tokenizer, by address."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: Seconds, for telling who has fallen silent.
        """
        self._clock = clock
        self._infos: dict[str, tuple[float, TokenizerInfo]] = {}

    def heard(self, address: str, info: TokenizerInfo) -> None:
        """A tokenizer has said how it is."""
        self._infos[address] = (self._clock(), info)

    def lost(self, address: str) -> None:
        """The stream of a tokenizer has ended: what it said is void."""
        self._infos.pop(address, None)

    def ready_addresses(self, model: str) -> list[str]:
        """Tokenizers that would serve a request for ``model``, in a stable order."""
        now = self._clock()
        return [
            address
            for address, (heard_at, info) in self._infos.items()
            if info.is_ready and info.model == model and now - heard_at < STALE_AFTER_S
        ]

    def models(self) -> dict[str, TokenizerInfo]:
        """Served name → what its tokenizers say.

        Of several the one that is ready, with the smallest context.
        """
        found: dict[str, TokenizerInfo] = {}
        for _, info in self._infos.values():
            known = found.get(info.model)
            if known is None or _says_more(info, known):
                found[info.model] = info
        return found

    def resolve_model(self, name: str | None) -> TokenizerInfo:
        """The model that a request means; ``None`` = the one that is served.

        Raises:
            ModelNotFound: No such model here.
            Unavailable: Nothing is known yet.
        """
        models = self.models()
        if not models:
            raise Unavailable("no tokenizer is reachable yet; try again soon", retry_after_s=1)
        if name is None:
            return next(iter(models.values()))
        if name not in models:
            raise ModelNotFound(
                f"the model {name!r} is not served here; served: {', '.join(sorted(models))}",
                param="model",
            )
        return models[name]

    def engines(self) -> list[tuple[str, Engine]]:
        """(served name, engine) of every live engine; each once, however many tokenizers see it."""
        newest: dict[tuple[str, str], Engine] = {}
        for _, info in self._infos.values():
            for engine in info.engines:
                key = (info.model, engine.worker_id)
                known = newest.get(key)
                if engine.phase is not Phase.GONE and (
                    known is None or engine.engine_id >= known.engine_id
                ):
                    newest[key] = engine
        return [(model, engine) for (model, _), engine in newest.items()]

    def worker_of(self, engine_id: int) -> str:
        """The label of an engine's worker; the only one there is, if that engine is not known."""
        labels = {engine.engine_id: engine.worker_id for _, engine in self.engines()}
        fallback = next(iter(labels.values())) if len(labels) == 1 else ""
        return labels.get(engine_id, fallback)

    def readiness(self) -> Readiness:
        """Whether any tokenizer would serve a request."""
        now = self._clock()
        fresh = [info for at, info in self._infos.values() if now - at < STALE_AFTER_S]
        if any(info.is_ready for info in fresh):
            return Readiness(is_ready=True)
        if not fresh:
            return Readiness(False, "no tokenizer is reachable", phase="starting")
        loading = _furthest(engine for info in fresh for engine in info.engines)
        if loading is None:
            return Readiness(False, fresh[0].not_ready_reason or "not ready", phase="starting")
        percent = round(100 * loading.loading_fraction)
        phase = loading.loading_phase or "loading"
        return Readiness(
            False, f"{loading.worker_id} is loading: {phase} {percent} %", phase, percent
        )


def _says_more(info: TokenizerInfo, known: TokenizerInfo) -> bool:
    if info.is_ready != known.is_ready:
        return info.is_ready
    return 0 < info.max_model_len < known.max_model_len


def _furthest(engines: Iterable[Engine]) -> Engine | None:
    loading = [engine for engine in engines if engine.phase is Phase.LOADING]
    return max(loading, key=lambda engine: engine.loading_fraction, default=None)
