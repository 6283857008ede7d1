"""The life of a prepared thing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, InvariantError
from services.common.sampling import Constraint, ConstraintKind
from services.scheduler.prepare import PreparedState, PreparedThings


def grammar(spec: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, spec)


def test_equal_constraints_share_one_thing() -> None:
    things = PreparedThings()
    one, is_new = things.acquire(grammar("a"), handle=1)
    two, is_new_again = things.acquire(grammar("a"), handle=2)
    assert (is_new, is_new_again) == (True, False)
    assert one is two
    assert things.release(1) is None
    assert things.release(2) == one.ref


def test_what_failed_is_asked_for_again() -> None:
    things = PreparedThings()
    thing, _ = things.acquire(grammar("a"), handle=1)
    assert things.finish(thing.ref, InvalidRequest("no")) is thing
    again, is_new = things.acquire(grammar("a"), handle=2)
    assert is_new and again.ref != thing.ref
    assert things.release(1) == thing.ref


def test_a_late_answer_about_something_released_is_dropped() -> None:
    things = PreparedThings()
    thing, _ = things.acquire(grammar("a"), handle=1)
    things.release(1)
    assert things.finish(thing.ref, None) is None


def test_a_request_acquires_once() -> None:
    things = PreparedThings()
    things.acquire(grammar("a"), handle=1)
    with pytest.raises(InvariantError):
        things.acquire(grammar("b"), handle=1)


@given(st.lists(st.tuples(st.sampled_from("arf"), st.integers(1, 6), st.sampled_from("xyz"))))
def test_a_thing_lives_exactly_as_long_as_it_has_users(
    events: list[tuple[str, int, str]],
) -> None:
    things = PreparedThings()
    using: dict[int, int] = {}
    asked: set[int] = set()
    released: set[int] = set()
    for name, handle, spec in events:
        if name == "a" and handle not in using:
            thing, is_new = things.acquire(grammar(spec), handle=handle)
            assert is_new == (thing.ref not in asked)
            assert thing.ref not in released
            assert thing.state is not PreparedState.FAILED
            asked.add(thing.ref)
            using[handle] = thing.ref
        elif name == "r":
            ref = using.pop(handle, None)
            left = things.release(handle)
            assert (left is not None) == (ref is not None and ref not in using.values())
            if left is not None:
                assert left == ref
                released.add(left)
        elif name == "f" and handle in using:
            things.finish(using[handle], InvalidRequest("no") if spec == "x" else None)
    assert asked - released == set(using.values())
