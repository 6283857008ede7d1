"""What is known of tokenizers and engines: models, readiness, the choice of a copy."""

from __future__ import annotations

import pytest

from services.common.errors import ModelNotFound
from services.gateway.fleet import STALE_AFTER_S, Engine, Fleet, Phase, TokenizerInfo


class Clock:
    """A clock that stands still unless it is set."""

    now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def engine(
    worker_id: str = "w", engine_id: int = 1, phase: Phase = Phase.READY, **more: object
) -> Engine:
    """An engine."""
    return Engine(engine_id, worker_id, phase, **more)  # type: ignore[arg-type]


def test_only_ready_copies_of_the_model_are_chosen() -> None:
    fleet = Fleet(Clock())
    fleet.heard("a", TokenizerInfo("m", is_ready=True))
    fleet.heard("b", TokenizerInfo("m", is_ready=False))
    fleet.heard("c", TokenizerInfo("other", is_ready=True))
    assert fleet.ready_addresses("m") == ["a"]


def test_a_copy_that_has_fallen_silent_does_not_count() -> None:
    clock = Clock()
    fleet = Fleet(clock)
    fleet.heard("a", TokenizerInfo("m", is_ready=True))
    clock.now = STALE_AFTER_S - 0.1
    assert fleet.readiness().is_ready
    clock.now = STALE_AFTER_S + 0.1
    assert not fleet.readiness().is_ready
    assert fleet.ready_addresses("m") == []


def test_a_lost_copy_is_forgotten_at_once() -> None:
    fleet = Fleet(Clock())
    fleet.heard("a", TokenizerInfo("m", is_ready=True))
    fleet.lost("a")
    assert not fleet.readiness().is_ready
    assert fleet.models() == {}


def test_while_loading_the_furthest_engine_is_told_with_its_percentage() -> None:
    fleet = Fleet(Clock())
    engines = (
        engine("slow", 1, Phase.LOADING, loading_phase="load weights", loading_fraction=0.1),
        engine("fast", 2, Phase.LOADING, loading_phase="warm up", loading_fraction=0.534),
    )
    fleet.heard("a", TokenizerInfo("m", engines=engines))
    readiness = fleet.readiness()
    assert (readiness.is_ready, readiness.phase, readiness.percent) == (False, "warm up", 53)
    assert "fast" in readiness.reason


def test_without_engines_the_tokenizer_s_own_reason_is_told() -> None:
    fleet = Fleet(Clock())
    fleet.heard("a", TokenizerInfo("m", not_ready_reason="no scheduler"))
    assert fleet.readiness().reason == "no scheduler"


def test_an_engine_seen_by_two_tokenizers_counts_once() -> None:
    fleet = Fleet(Clock())
    for address in ("a", "b"):
        fleet.heard(address, TokenizerInfo("m", engines=(engine(),)))
    assert len(fleet.engines()) == 1


def test_of_two_lives_of_a_worker_the_newer_counts() -> None:
    fleet = Fleet(Clock())
    lives = (engine("w", 2), engine("w", 1), engine("gone", 3, Phase.GONE))
    fleet.heard("a", TokenizerInfo("m", engines=lives))
    assert [found.engine_id for _, found in fleet.engines()] == [2]


def test_a_model_is_found_by_name_or_because_there_is_only_one() -> None:
    fleet = Fleet(Clock())
    fleet.heard("a", TokenizerInfo("m", max_model_len=8))
    assert fleet.resolve_model("m").max_model_len == 8
    assert fleet.resolve_model(None).model == "m"
    with pytest.raises(ModelNotFound, match="served: m"):
        fleet.resolve_model("n")
