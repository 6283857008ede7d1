"""truncation: auto leaves out the oldest turns, and no more of them than it must."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from services.gateway.generation import ChatPrompt
from tests.unit.gateway.desk import Desk

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "old output"}
GIVEN: list[dict[str, Any]] = [
    {"role": "developer", "content": "stays"},
    {"role": "user", "content": "first"},
    *(CALL, OUTPUT),
    {"role": "assistant", "content": "second"},
    {"role": "user", "content": "third"},
    {"role": "assistant", "content": "fourth"},
    {"role": "user", "content": "last"},
]


def contents(prompt: ChatPrompt) -> list[str | None]:
    """What each message says."""
    return [message["content"] for message in orjson.loads(prompt.messages_json)]


async def kept(desk: Desk, room: int, **fields: Any) -> tuple[list[str | None], int]:
    """What is kept where a message counts as 10 tokens, and how often was counted."""
    output = 256 - room  # the fake model's context
    planned = desk.plan_response(
        GIVEN, truncation="auto", max_output_tokens=output, instructions="be", **fields
    )
    assert planned.truncation is not None
    num_counted = 0

    async def count(prompt: ChatPrompt) -> int:
        nonlocal num_counted
        num_counted += 1
        return 10 * len(contents(prompt))

    return contents(await planned.truncation.fitted(count)), num_counted


WHOLE = ["be", "stays", "first", None, "old output", "second", "third", "fourth", "last"]


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (90, WHOLE),
        (89, ["be", "stays", "third", "fourth", "last"]),
        (50, ["be", "stays", "third", "fourth", "last"]),
        (49, ["be", "stays", "last"]),
        (5, ["be", "stays", "last"]),
    ],
)
async def test_the_longest_end_that_fits_is_kept(
    desk: Desk, room: int, expected: list[str | None]
) -> None:
    assert (await kept(desk, room))[0] == expected


async def test_what_fits_is_counted_once(desk: Desk) -> None:
    assert (await kept(desk, 200))[1] == 1


async def test_long_conversations_are_counted_a_few_times_only(desk: Desk) -> None:
    given = [{"role": "user", "content": str(number)} for number in range(1000)]
    planned = desk.plan_response(given, truncation="auto", max_output_tokens=6)
    assert planned.truncation is not None
    counted = []

    async def count(prompt: ChatPrompt) -> int:
        counted.append(prompt)
        return 10 * len(contents(prompt))

    found = contents(await planned.truncation.fitted(count))
    assert found == [str(number) for number in range(975, 1000)]
    assert len(counted) <= 12


def test_unless_it_is_asked_for_nothing_is_left_out(desk: Desk) -> None:
    for fields in ({}, {"truncation": "disabled"}):
        assert desk.plan_response(GIVEN, **fields).truncation is None
