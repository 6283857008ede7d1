"""What must be compiled, loaded or fetched before a request can run: asked for once, shared,
released.

The life of a prepared thing: requested -> ready | failed -> released with its last user. Knows no
network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from services.common.errors import InvariantError, SluicewayError
from services.common.sampling import Constraint


class PreparedState(Enum):
    """Where a prepared thing stands; a released one is forgotten."""

    REQUESTED = auto()
    READY = auto()
    FAILED = auto()


@dataclass(slots=True)
class PreparedThing:
    """A grammar in the worker.

    Attributes:
        ref: Its number on the wire; > 0, never used twice for an engine.
        constraint: What it was made of.
        state: See ``PreparedState``.
        error: Why it failed.
        users: Handles of the requests that need it.
    """

    ref: int
    constraint: Constraint
    state: PreparedState = PreparedState.REQUESTED
    error: SluicewayError | None = None
    users: set[int] = field(default_factory=set)


class PreparedThings:
    """All prepared things of one engine."""

    def __init__(self) -> None:
        self._by_ref: dict[int, PreparedThing] = {}
        self._by_constraint: dict[Constraint, PreparedThing] = {}
        self._by_user: dict[int, PreparedThing] = {}
        self._last_ref = 0

    def acquire(self, constraint: Constraint, *, handle: int) -> tuple[PreparedThing, bool]:
        """Make a request a user of what it needs.

        Args:
            constraint: What it needs.
            handle: The request; it has acquired nothing yet.

        Returns:
            The thing, and whether it is new: then the worker must be asked for it.
        """
        if handle in self._by_user:
            raise InvariantError(f"handle {handle} has acquired a prepared thing twice")
        thing = self._by_constraint.get(constraint)
        is_new = thing is None
        if thing is None:
            self._last_ref += 1
            thing = PreparedThing(self._last_ref, constraint)
            self._by_ref[thing.ref] = self._by_constraint[constraint] = thing
        thing.users.add(handle)
        self._by_user[handle] = thing
        return thing, is_new

    def finish(self, ref: int, error: SluicewayError | None) -> PreparedThing | None:
        """The worker has answered.

        Returns:
            The thing, whose users now go on or end; ``None`` if it was released or answered before.
        """
        thing = self._by_ref.get(ref)
        if thing is None or thing.state is not PreparedState.REQUESTED:
            return None
        thing.state = PreparedState.READY if error is None else PreparedState.FAILED
        thing.error = error
        if error is not None:
            # The next request with this constraint asks again: the cause may have passed.
            self._by_constraint.pop(thing.constraint, None)
        return thing

    def release(self, handle: int) -> int | None:
        """A request needs its thing no more (or needed none).

        Returns:
            The ref that its last user has left: the worker may drop it.
        """
        thing = self._by_user.pop(handle, None)
        if thing is None:
            return None
        thing.users.discard(handle)
        if thing.users:
            return None
        del self._by_ref[thing.ref]
        if self._by_constraint.get(thing.constraint) is thing:
            del self._by_constraint[thing.constraint]
        return thing.ref
