"""The written lives of a handle and of an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvariantError
from services.scheduler.lives import (
    ENGINE_MOVES,
    HANDLE_MOVES,
    EngineEvent,
    EngineState,
    HandleEvent,
    HandleState,
    engine_life,
    handle_life,
)

ENDED = (HandleState.FINISHED, HandleState.LOST)


@given(st.lists(st.sampled_from(HandleEvent)))
def test_a_handle_ends_at_most_once_and_nothing_follows(events: list[HandleEvent]) -> None:
    life = handle_life()
    num_ends = 0
    for event in events:
        if not life.allows(event):
            with pytest.raises(InvariantError, match=event.name):
                life.move(event)
            continue
        assert life.state not in ENDED
        num_ends += life.move(event) in ENDED
    assert num_ends == (life.state in ENDED)


def test_every_handle_that_has_not_ended_can_finish_or_be_lost() -> None:
    for state in set(HandleState) - set(ENDED):
        assert HANDLE_MOVES[state, HandleEvent.FINISH] is HandleState.FINISHED
        assert HANDLE_MOVES[state, HandleEvent.SESSION_LOST] is HandleState.LOST


def test_a_handle_gets_tokens_only_between_its_acceptance_and_its_abort() -> None:
    sources = {state for state, event in HANDLE_MOVES if event is HandleEvent.TOKENS}
    assert sources == {HandleState.QUEUED, HandleState.STREAMING}


@given(st.lists(st.sampled_from(EngineEvent)))
def test_an_engine_ends_once_and_is_never_ready_again_after_a_drain(
    events: list[EngineEvent],
) -> None:
    life = engine_life()
    seen = [life.state]
    for event in events:
        if life.allows(event):
            seen.append(life.move(event))
    if EngineState.DRAINING in seen:
        after = seen[seen.index(EngineState.DRAINING) :]
        assert set(after) <= {EngineState.DRAINING, EngineState.GONE}
    assert seen.count(EngineState.GONE) <= 1
    assert EngineState.GONE not in seen[:-1]


def test_every_engine_can_end() -> None:
    for state in set(EngineState) - {EngineState.GONE}:
        assert ENGINE_MOVES[state, EngineEvent.END] is EngineState.GONE
