"""The thought of a choice is told apart from its answer, streamed and whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.common.convert import constraint_from_message
from services.common.grammar import grammar_of
from services.gateway.parsers import Parsers
from services.gateway.reasoning.base import ThoughtParser
from tests.unit.gateway.desk import Desk, planning
from tests.unit.gateway.grammars import accepts
from tests.unit.gateway.test_tools import (
    ARGUMENTS,
    NAMED,
    ONE_CALL,
    WEATHER,
    allows,
    calls_of,
    said,
    streamed_calls,
)

THOUGHT = "<think>a b</think>c d"
OPENED = "a b</think>c d"


def parser(name: str, *, is_open: bool | None = None) -> ThoughtParser:
    marks = Parsers(reasoning=name).thought_format("any model")
    assert marks is not None
    return ThoughtParser(marks, is_open=marks.is_opened_by_prompt if is_open is None else is_open)


def read(reading: ThoughtParser, pieces: list[str]) -> tuple[str, str]:
    """Thought and answer out of pieces, one token each."""
    parted = [*(reading.feed(piece, num_tokens=1) for piece in pieces), reading.end()]
    return "".join(one.thought for one in parted), "".join(one.answer for one in parted)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("qwen3", THOUGHT, ("a b", "c d")),
        ("qwen3", "\n<think>\na b\n</think>\n\nc d\n", ("a b\n", "c d\n")),
        ("qwen3", "<think>\n\n</think>\n\nc d", ("", "c d")),
        ("qwen3", "<think>a b", ("a b", "")),
        ("qwen3", "<think>a </thin", ("a </thin", "")),
        ("qwen3", " c d", ("", " c d")),
        ("qwen3", "<thin", ("", "<thin")),
        ("qwen3", "c <think>d</think>", ("", "c <think>d</think>")),
        ("qwen3", OPENED, ("", OPENED)),
        ("qwen3", "", ("", "")),
        ("deepseek_r1", OPENED, ("a b", "c d")),
        ("deepseek_r1", THOUGHT, ("a b", "c d")),
        ("deepseek_r1", "a b", ("a b", "")),
        ("deepseek_r1", "a</think>b</think>c", ("a", "b</think>c")),
        ("deepseek_r1", "", ("", "")),
    ],
)
def test_thought_and_answer_are_parted_at_the_marks(
    name: str, text: str, wanted: tuple[str, str]
) -> None:
    assert read(parser(name), [text]) == wanted
    assert read(parser(name), list(text)) == wanted


@settings(deadline=None)
@given(
    name=st.sampled_from(["qwen3", "deepseek_r1"]),
    fragments=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", " ", "\n", "a", "é"]),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_it_does_not_matter_how_the_text_is_cut(
    name: str, fragments: list[str], cuts: list[int]
) -> None:
    text = "".join(fragments)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    assert read(parser(name), pieces) == read(parser(name), [text])


def test_a_thought_is_told_as_it_comes() -> None:
    reading = parser("qwen3")
    assert reading.feed("<think>so", num_tokens=2).thought == "so"
    assert reading.feed(" it", num_tokens=1).thought == " it"
    assert reading.feed("</think>yes", num_tokens=2).answer == "yes"


@pytest.mark.parametrize(
    ("pieces", "num_tokens"),
    [
        (["<think>", "a", " b", "</think>", "c", " d"], 4),
        (["<", "think", ">", "a", "</", "think", ">", "c"], 7),
        (["<think>", "a"], 2),
        (["c", " d"], 0),
        (["<think>a</think>c"], 1),
    ],
)
def test_the_tokens_of_a_thought_and_its_marks_are_counted(
    pieces: list[str], num_tokens: int
) -> None:
    reading = parser("qwen3")
    read(reading, pieces)
    assert reading.num_tokens == num_tokens


def test_tokens_of_an_update_in_which_a_thought_ends_are_shared_out() -> None:
    reading = parser("qwen3")
    reading.feed("<think>", num_tokens=1)
    reading.feed("aaaa</think>bbbbbbbbbbbb", num_tokens=4)
    assert reading.num_tokens == 3


@pytest.fixture
def thinking(desk: Desk) -> Desk:
    """A model that may open a thought."""
    desk.context = planning(reasoning="qwen3", tool_calls="hermes")
    return desk


@pytest.fixture
def thinker(desk: Desk) -> Desk:
    """A model whose prompt opens the thought."""
    desk.context = planning(reasoning="deepseek_r1")
    return desk


def streamed(chunks: list[Any]) -> tuple[str, str]:
    """Thought and content out of a stream; no delta may show a mark."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for text in (d.get("reasoning", "") + (d.get("content") or "") for d in deltas):
        assert "<th" not in text and "</" not in text and "nk>" not in text
    return (
        "".join(delta.get("reasoning", "") for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
    )


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_reply_tells_thought_and_answer_apart_streamed_and_whole(
    thinking: Desk, size: int
) -> None:
    thinking.script = said(THOUGHT, size=size, tokens_per_delta=2)
    reply = thinking.chat()
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a b", "c d")
    *chunks, usage, _ = thinking.chat_events(stream_options={"include_usage": True})
    assert streamed(chunks) == ("a b", "c d")
    assert usage["usage"] == reply["usage"]
    spent = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < spent <= reply["usage"]["completion_tokens"]


def test_reasoning_tokens_are_those_up_to_the_closing_mark(thinking: Desk) -> None:
    thinking.script = said(THOUGHT, size=1)
    reply = thinking.chat(n=2)
    spent = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert spent == len("<think>a b</think>")  # the second choice begins with "1:", not a thought


def test_the_thought_can_be_left_out(thinking: Desk) -> None:
    thinking.script = said(THOUGHT)
    reply = thinking.chat(include_reasoning=False)
    assert "reasoning" not in reply["choices"][0]["message"]
    assert reply["choices"][0]["message"]["content"] == "c d"
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    *chunks, _ = thinking.chat_events(include_reasoning=False)
    assert streamed(chunks) == ("", "c d")


def test_without_a_parser_marks_are_content(desk: Desk) -> None:
    desk.script = said(THOUGHT)
    reply = desk.chat()
    assert reply["choices"][0]["message"]["content"] == THOUGHT
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_log_probabilities_of_a_thought_are_complete_streamed_and_whole(thinking: Desk) -> None:
    thinking.script = said(THOUGHT)
    reply = thinking.chat(logprobs=True)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"]
    *chunks, _ = thinking.chat_events(logprobs=True)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for one in logprobs if one for entry in one["content"]] == entries


def test_calls_follow_a_thought_and_are_not_looked_for_in_it(thinking: Desk) -> None:
    call = f'<tool_call>{{"name": "get_w", "arguments": {ARGUMENTS}}}</tool_call>'
    thinking.script = said(f"<think>maybe {call}?</think>\n\n{call}")
    reply = thinking.chat(tools=[WEATHER])
    message = reply["choices"][0]["message"]
    assert message["reasoning"] == f"maybe {call}?"
    assert message["content"] is None
    assert calls_of(reply) == [("get_w", ARGUMENTS)]
    *chunks, _ = thinking.chat_events(tools=[WEATHER])
    assert streamed_calls(chunks) == calls_of(reply)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
    ],
)
def test_a_thought_that_the_prompt_does_not_open_is_not_expected(
    thinker: Desk, fields: dict[str, Any]
) -> None:
    thinker.script = said("c d")
    assert thinker.chat()["choices"][0]["message"]["reasoning"] == "c d"
    assert thinker.chat(**fields)["choices"][0]["message"]["content"] == "c d"


CONSTRAINTS = [
    pytest.param({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'n"o', "maybe", id="choice"),
    pytest.param({"structured_outputs": {"regex": r"a/b\/\d+"}}, "a/b/12", "a/b", id="regex"),
    pytest.param(
        {"structured_outputs": {"grammar": "start: a\na: /x+/ y\ny: (/y/)*"}}, "xxy", "y", id="lark"
    ),
    pytest.param({"structured_outputs": {"json": {"type": "integer"}}}, "12", "x", id="json"),
    pytest.param({"response_format": {"type": "json_object"}}, '{"a": 1}', "1", id="object"),
    pytest.param({"tools": [WEATHER], "tool_choice": NAMED}, ARGUMENTS, "{}", id="named"),
    pytest.param({"tools": [WEATHER], "tool_choice": "required"}, ONE_CALL, "[]", id="required"),
]


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize(("fields", "good", "bad"), CONSTRAINTS)
def test_a_constraint_starts_after_the_thought(
    thinker: Desk, fields: dict[str, Any], good: str, bad: str, as_tokens: bool
) -> None:
    thinker.chat(**fields)

    def allowed(text: str) -> bool:
        return accepts(thinker.requests[-1], text, marks_are_tokens=as_tokens)

    assert allowed(f"so\nor </th so?</think>{good}")
    assert allowed(f"</think>\n\n{good}")
    assert not allowed(good)
    assert not allowed(f"so</think>{bad}")
    assert not allowed(f"so</think>more</think>{good}")


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize(("fields", "good", "bad"), CONSTRAINTS)
def test_a_thought_that_is_asked_for_is_opened_before_a_constraint(
    thinking: Desk, fields: dict[str, Any], good: str, bad: str, as_tokens: bool
) -> None:
    thinking.chat(chat_template_kwargs={"enable_thinking": True}, **fields)

    def allowed(text: str) -> bool:
        return accepts(thinking.requests[-1], text, marks_are_tokens=as_tokens)

    assert allowed(f"<think>so</think>{good}")
    assert not allowed(f"<think>so</think>{bad}")
    assert not allowed(good)


def test_a_constraint_after_the_thought_of_a_model_without_such_tokens_is_refused(
    thinker: Desk,
) -> None:
    thinker.chat(response_format={"type": "json_object"})
    constraint = constraint_from_message(thinker.requests[0].constraint)
    assert constraint is not None
    matcher = LLMatcher(LLTokenizer("byte"), grammar_of(constraint))
    assert 'unknown special token: "</think>"' in matcher.get_error()


@pytest.mark.parametrize(("fields", "good", "bad"), CONSTRAINTS)
def test_a_constraint_holds_from_the_start_if_no_thought_is_sure_to_come(
    thinking: Desk, fields: dict[str, Any], good: str, bad: str
) -> None:
    thinking.chat(**fields)
    assert allows(thinking, good)
    assert not allows(thinking, bad)
    assert not allows(thinking, f"<think>so</think>{good}")


def test_a_constraint_may_hold_the_marks_itself(thinking: Desk) -> None:
    thinking.script = said(THOUGHT)
    reply = thinking.chat(structured_outputs={"choice": [THOUGHT]})
    assert allows(thinking, THOUGHT)
    assert reply["choices"][0]["message"]["reasoning"] == "a b"
