"""The lives of a handle and of an engine, written as tables (wire.md, section 5 of the design).

A table says every move there is; anything else is a bug and raises. Knows neither time nor network.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Generic, TypeVar

from services.common.errors import InvariantError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class _Named(Enum):
    """Hashed by identity: Enum's own hash is a function in Python, and the tables are looked into
    for every row of every step."""

    __hash__ = object.__hash__


class HandleState(_Named):
    """Where one choice of one attempt stands in its Session."""

    ADDED = auto()
    QUEUED = auto()
    STREAMING = auto()
    ABORTING = auto()
    FINISHED = auto()
    LOST = auto()


class HandleEvent(_Named):
    """What happens to a handle."""

    ACCEPT = auto()
    TOKENS = auto()
    ABORT = auto()
    FINISH = auto()
    SESSION_LOST = auto()


class EngineState(_Named):
    """Where one attachment of a worker stands. One engine_id, one life."""

    LOADING = auto()
    READY = auto()
    STALLED = auto()
    DRAINING = auto()
    GONE = auto()


class EngineEvent(_Named):
    """What happens to an engine."""

    LOADED = auto()
    STALL = auto()
    RECOVER = auto()
    DRAIN = auto()
    END = auto()


HANDLE_MOVES: Mapping[tuple[HandleState, HandleEvent], HandleState] = {
    (HandleState.ADDED, HandleEvent.ACCEPT): HandleState.QUEUED,
    (HandleState.ADDED, HandleEvent.FINISH): HandleState.FINISHED,
    (HandleState.ADDED, HandleEvent.SESSION_LOST): HandleState.LOST,
    (HandleState.QUEUED, HandleEvent.TOKENS): HandleState.STREAMING,
    (HandleState.QUEUED, HandleEvent.ABORT): HandleState.ABORTING,
    (HandleState.QUEUED, HandleEvent.FINISH): HandleState.FINISHED,
    (HandleState.QUEUED, HandleEvent.SESSION_LOST): HandleState.LOST,
    (HandleState.STREAMING, HandleEvent.TOKENS): HandleState.STREAMING,
    (HandleState.STREAMING, HandleEvent.ABORT): HandleState.ABORTING,
    (HandleState.STREAMING, HandleEvent.FINISH): HandleState.FINISHED,
    (HandleState.STREAMING, HandleEvent.SESSION_LOST): HandleState.LOST,
    (HandleState.ABORTING, HandleEvent.FINISH): HandleState.FINISHED,
    (HandleState.ABORTING, HandleEvent.SESSION_LOST): HandleState.LOST,
}

ENGINE_MOVES: Mapping[tuple[EngineState, EngineEvent], EngineState] = {
    (EngineState.LOADING, EngineEvent.LOADED): EngineState.READY,
    (EngineState.LOADING, EngineEvent.DRAIN): EngineState.DRAINING,
    (EngineState.LOADING, EngineEvent.END): EngineState.GONE,
    (EngineState.READY, EngineEvent.STALL): EngineState.STALLED,
    (EngineState.READY, EngineEvent.DRAIN): EngineState.DRAINING,
    (EngineState.READY, EngineEvent.END): EngineState.GONE,
    (EngineState.STALLED, EngineEvent.RECOVER): EngineState.READY,
    (EngineState.STALLED, EngineEvent.DRAIN): EngineState.DRAINING,
    (EngineState.STALLED, EngineEvent.END): EngineState.GONE,
    (EngineState.DRAINING, EngineEvent.END): EngineState.GONE,
}


class Life(Generic[S, E]):
    """A position in a table of moves.

    Attributes:
        state: Where it stands now.
    """

    __slots__ = ("_moves", "state")

    def __init__(self, moves: Mapping[tuple[S, E], S], state: S) -> None:
        self._moves = moves
        self.state = state

    def move(self, event: E) -> S:
        """Take the move that the table has for this event.

        Returns:
            The new state.

        Raises:
            InvariantError: The table has none.
        """
        key = (self.state, event)
        if key not in self._moves:
            raise InvariantError(f"{event.name} cannot happen to what is {self.state.name}")
        self.state = self._moves[key]
        return self.state

    def allows(self, event: E) -> bool:
        """Whether the table has a move for this event."""
        return (self.state, event) in self._moves


def handle_life() -> Life[HandleState, HandleEvent]:
    """A handle that was just added."""
    return Life(HANDLE_MOVES, HandleState.ADDED)


def engine_life() -> Life[EngineState, EngineEvent]:
    """An engine that just attached."""
    return Life(ENGINE_MOVES, EngineState.LOADING)
