"""Responses are kept within bounds, and for nobody else."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, NotFound
from services.gateway.openai.responses.listing import list_page, page_of
from services.gateway.openai.responses.store import ResponseStore, Turn
from tests.unit.gateway.desk import Desk, response_store


def turn(name: str, *, size: int = 100, before: Turn | None = None) -> Turn:
    """A turn of so many bytes."""
    response = orjson.dumps({"output": [name]})
    return Turn(response + b" " * (size - len(response) - 2), b"[]", before)


def found_in(store: ResponseStore, tenant: str = "") -> set[str]:
    """Which of a, b, c ... are kept."""
    found = set()
    for name in "abcdef":
        try:
            store.get(tenant, name)
        except NotFound:
            continue
        found.add(name)
    return found


def test_the_oldest_go_when_there_are_too_many() -> None:
    store = response_store(max_responses=2)
    for name in "abc":
        store.put("", name, turn(name))
    assert found_in(store) == {"b", "c"} and store.num_bytes == 200


def test_the_oldest_go_when_they_are_too_large() -> None:
    store = response_store(max_bytes=250)
    for name in "abc":
        store.put("", name, turn(name))
    assert found_in(store) == {"b", "c"}
    store.put("", "d", turn("d", size=251))
    assert found_in(store) == set() and store.num_bytes == 0


def test_what_is_too_old_goes() -> None:
    now = 0.0
    store = response_store(now=lambda: now)
    store.put("", "a", turn("a"))
    now = 59.0
    store.put("", "b", turn("b"))
    assert found_in(store) == {"a", "b"}
    now = 61.0
    assert found_in(store) == {"b"} and store.num_bytes == 100


def test_what_is_deleted_is_not_found_and_frees_its_bytes() -> None:
    store = response_store()
    store.put("", "a", turn("a"))
    store.delete("", "a")
    assert found_in(store) == set() and store.num_bytes == 0
    with pytest.raises(NotFound, match="a gateway keeps its own responses"):
        store.delete("", "a")


def test_each_key_finds_its_own_only() -> None:
    store = response_store()
    store.put("one", "a", turn("a"))
    store.put("two", "b", turn("b"))
    assert (found_in(store, "one"), found_in(store, "two")) == ({"a"}, {"b"})
    assert found_in(store) == set()
    with pytest.raises(NotFound):
        store.delete("two", "a")


def test_a_conversation_outlives_the_responses_that_it_went_through() -> None:
    store = response_store(max_responses=1)
    first = turn("a")
    second = turn("b", before=first)
    store.put("", "a", first)
    store.put("", "b", second)
    assert found_in(store) == {"b"} and store.num_bytes == 200
    assert store.get("", "b").conversation() == ["a", "b"]
    store.delete("", "b")
    assert store.num_bytes == 0


def test_an_item_is_found_as_long_as_its_response_is() -> None:
    store = response_store(max_responses=1)
    for name in "ab":
        response = {"output": [{"id": f"out-{name}", "of": name}]}
        store.put("", name, Turn.of(response, given=[{"id": "in", "of": name}], before=None))
    assert store.item("", "out-a") is None
    assert store.item("", "out-b") == {"id": "out-b", "of": "b"}
    assert store.item("", "in") == {"id": "in", "of": "b"}
    assert store.item("another", "in") is None
    store.delete("", "b")
    assert store.item("", "in") is None


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "delete"]), st.sampled_from("abcdef"), st.integers(0, 5))
)


@given(operations=OPERATIONS)
def test_the_bytes_are_those_of_all_turns_that_can_be_reached(
    operations: list[tuple[str, str, int]],
) -> None:
    store = response_store(max_responses=4, max_bytes=700)
    turns: list[Turn] = []
    for number, (what, name, back) in enumerate(operations):
        if what == "delete" and name in found_in(store):
            store.delete("", name)
        elif what == "put" and name not in found_in(store):
            before = turns[-back] if 0 < back <= len(turns) else None
            turns.append(turn(str(number), before=before))
            store.put("", name, turns[-1])
        reached: dict[int, Turn] = {}
        for kept in found_in(store):
            one: Turn | None = store.get("", kept)
            while one is not None:
                reached[id(one)] = one
                one = one.before
        assert store.num_bytes == 100 * len(reached) <= 700
        assert len(store) == len(found_in(store)) <= 4


def test_what_is_not_to_be_stored_is_not(desk: Desk) -> None:
    response = desk.respond(store=False)
    assert response["store"] is False and len(desk.store) == 0
    with pytest.raises(InvalidRequest) as caught:
        desk.respond(previous_response_id=response["id"])
    assert caught.value.code == "previous_response_not_found"


def test_what_is_stored_is_what_was_sent(desk: Desk) -> None:
    whole = desk.respond()
    streamed = desk.response_events()[-1]["response"]
    for sent in (whole, streamed):
        assert orjson.loads(desk.store.get("", sent["id"]).response) == sent


def test_nobody_goes_on_from_what_another_key_has_stored(desk: Desk) -> None:
    response = desk.respond(tenant="one")
    desk.respond(tenant="one", previous_response_id=response["id"])
    with pytest.raises(InvalidRequest) as caught:
        desk.respond(tenant="two", previous_response_id=response["id"])
    assert caught.value.param == "previous_response_id"


ITEMS: list[dict[str, Any]] = [{"id": str(number)} for number in range(5)]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, "43210", False),
        ({"order": "asc"}, "01234", False),
        ({"limit": "2"}, "43", True),
        ({"limit": "2", "after": "3"}, "21", True),
        ({"limit": "2", "order": "asc", "after": "2"}, "34", False),
        ({"after": "0"}, "", False),
    ],
)
def test_pages(query: dict[str, str], ids: str, has_more: bool) -> None:
    page = list_page(ITEMS, page_of(query))
    assert [item["id"] for item in page["data"]] == list(ids)
    assert page["has_more"] is has_more
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "9"}]
)
def test_a_page_that_means_nothing_is_refused_by_name(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        list_page(ITEMS, page_of(query))
    assert caught.value.param in query
