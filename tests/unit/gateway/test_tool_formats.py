"""Each format of tool calls: what it reads, and that it does not matter how the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.gateway.parsers import Parsers
from services.gateway.tool_calls.base import CallParser, CallPart, Parsed

NAMES = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3")
TOOLS = {
    "get_w": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "ping": {},
}
Call = tuple[str, Any]

PARIS = ("get_w", {"city": "Paris", "days": 3})
BRACES = ("get_w", {"city": 'a"}]</tool_call>{', "days": 1})

FOUND: list[tuple[str, str, str, list[Call]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "get_w", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "",
        [PARIS],
    ),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"name": "ping"}</tool_call>\n'
        '<tool_call>{"name": "get_w", "arguments": {"city": "Paris", "days": 3}}</tool_call>\n',
        "Let me see.",
        [("ping", {}), PARIS],
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_w", "arguments": '
        '{"city": "a\\"}]</tool_call>{", "days": 1}}</tool_call>',
        "",
        [BRACES],
    ),
    ("hermes", '<tool_call>{"name": "ping", "arguments": "{}"}', "", [("ping", {})]),
    (
        "qwen3",
        '<tool_call>\n{"name": "get_w", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "",
        [PARIS],
    ),
    (
        "qwen3",
        "Hm.\n<tool_call>\n<function=get_w>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "Hm.",
        [("get_w", {"city": "12", "days": 3})],
    ),
    ("qwen3", "<tool_call><function=ping></function></tool_call>", "", [("ping", {})]),
    (
        "llama3_json",
        '{"name": "get_w", "parameters": {"city": "Paris", "days": 3}}',
        "",
        [PARIS],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "ping", "parameters": {}}; {"name": "ping", "parameters": {}}',
        "",
        [("ping", {}), ("ping", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_w", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "ping", "arguments": {}}]',
        "",
        [PARIS, ("ping", {})],
    ),
    (
        "mistral",
        'So: [TOOL_CALLS]get_w[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]ping{}',
        "So:",
        [PARIS, ("ping", {})],
    ),
    ("mistral", "[TOOL_CALLS]ping[CALL_ID]abc[ARGS]{}", "", [("ping", {})]),
    ("pythonic", "[get_w(city='Paris', days=3), ping()]", "", [PARIS, ("ping", {})]),
    (
        "pythonic",
        '[get_w(city="a\\"}]</tool_call>{", days=1)]',
        "",
        [BRACES],
    ),
    (
        "pythonic",
        "[ping(a=[1, -2.5, None], b={'x': true})]",
        "",
        [("ping", {"a": [1, -2.5, None], "b": {"x": True}})],
    ),
]

NO_CALLS = {
    "hermes": [
        "<tool_call>",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "ping", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "ping", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "ping", "arguments": {"x": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "ping", "arguments": {"x": ',
        "a < b and <tool",
    ],
    "qwen3": [
        "<tool_call><function=unknown></function></tool_call>",
        "<tool_call><function=ping><parameter=a>1",
    ],
    "llama3_json": [
        '{"name": "Ada", "age": 36}',
        '{"name": "ping", "parameters": ',
        "<|python_tag|>print(1)",
        'See {"name": "ping", "parameters": {}}',
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [1, 2]",
        "[TOOL_CALLS]unknown{}",
        "[TOOL_CALLS]ping{",
    ],
    "pythonic": [
        "[1, 2, 3]",
        "[]",
        "[unknown()]",
        "[ping(1)]",
        "[ping(**{'a': 1})]",
        "[ping(a=b)]",
        "[ping(a=1e999)]",
        "[ping(a={1: 2})]",
        "[ping(a=b'x')]",
        "[ping(",
        "[" * 300 + "]" * 300,
        "See [ping()]",
    ],
}


def parser(name: str, *, is_parallel: bool = True) -> CallParser:
    """Of a format, for TOOLS."""
    found = Parsers(tool_calls=name).call_format("any model")
    assert found is not None
    return CallParser(found.read, TOOLS, is_parallel=is_parallel)


def read(reading: CallParser, pieces: list[str]) -> tuple[str, list[Call]]:
    """Text and calls out of pieces; checks that the parts of calls come in order."""
    parsed: list[Parsed] = [*map(reading.feed, pieces), reading.end()]
    return "".join(one.text for one in parsed), joined([p for one in parsed for p in one.calls])


def joined(parts: list[CallPart]) -> list[Call]:
    """Calls out of their parts."""
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if part.name:
            assert part.index == len(calls)
            calls.append((part.name, []))
        assert part.index == len(calls) - 1
        calls[-1][1].append(part.arguments)
    return [(name, json.loads("".join(arguments))) for name, arguments in calls]


def in_order(reading: CallParser, pieces: list[str]) -> list[str | tuple[int, str, str]]:
    """Texts and calls (index, name, arguments) in the order in which they stand."""
    found: list[str | tuple[int, str, str]] = []
    for part in [p for one in [*map(reading.feed, pieces), reading.end()] for p in one.parts]:
        last = found[-1] if found else None
        if isinstance(part, str):
            found[-1:] = [last + part] if isinstance(last, str) else [*found[-1:], part]
        elif isinstance(last, tuple) and last[0] == part.index:
            assert not part.name
            found[-1] = (*last[:2], last[2] + part.arguments)
        else:
            found.append((part.index, part.name, part.arguments))
    return found


def test_text_between_calls_stays_where_it_stands() -> None:
    call = '<tool_call>{"name": "ping"}</tool_call>'
    found = in_order(parser("hermes"), [f"One: {call} two: {call} three."])
    assert found == ["One:", (0, "ping", "{}"), "two:", (1, "ping", "{}"), "three."]


@pytest.mark.parametrize(("name", "text", "content", "calls"), FOUND)
def test_calls_are_found_and_the_text_around_them_is_content(
    name: str, text: str, content: str, calls: list[Call]
) -> None:
    assert read(parser(name), [text]) == (content, calls)
    assert read(parser(name), list(text)) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts]
)
def test_what_reads_like_a_call_and_is_none_stays_text(name: str, text: str) -> None:
    assert read(parser(name), [text]) == (text, [])
    assert read(parser(name), list(text)) == (text, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_text_without_calls_comes_through_as_it_is_and_at_once(name: str) -> None:
    reading = parser(name)
    assert reading.feed("Hello, ").text.strip() == "Hello,"
    rest = reading.feed("world \n").text + reading.end().text
    assert rest.strip() == "world"
    assert read(parser(name), [" \n Hi [x] {y} <z> \n"]) == (" \n Hi [x] {y} <z> \n", [])


HERMES_CALL = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
QWEN_CALL = "<tool_call><function=ping></function></tool_call>"
CUT: list[tuple[str, str, str]] = [
    *(
        ("hermes", HERMES_CALL, HERMES_CALL[:size])
        for size in range(1, HERMES_CALL.index("}}") + 2)
    ),
    *(("qwen3", QWEN_CALL, QWEN_CALL[:size]) for size in range(1, QWEN_CALL.index("</tool") - 1)),
    ("llama3_json", '{"name": "ping", "parameters": {}}; ', '{"name": "pi'),
    ("mistral", '[TOOL_CALLS] [{"name": "ping", "arguments": {}}, ', '{"name": "pi'),
    ("mistral", "[TOOL_CALLS]ping{}", "[TOOL_CALLS] ["),
    ("mistral", "[TOOL_CALLS]ping{}", "[TOOL_CALLS]pi"),
    ("mistral", "[TOOL_CALLS]ping{}", "[TOOL_CALLS]ping{"),
]


@pytest.mark.parametrize(("name", "call", "cut"), CUT)
def test_nothing_of_a_call_that_is_cut_is_shown_beside_whole_calls(
    name: str, call: str, cut: str
) -> None:
    text = f"So: {call}\n{cut}" if name != "llama3_json" else call + cut
    content = "So:" if name != "llama3_json" else ""
    for pieces in ([text], list(text)):
        assert read(parser(name), pieces) == (content, [("ping", {})])


@pytest.mark.parametrize("name", ["hermes", "qwen3"])
def test_a_closing_mark_that_is_cut_is_not_shown(name: str) -> None:
    for size in range(len("</tool_call>")):
        text = HERMES_CALL.replace("</tool_call>", "</tool_call>"[:size])
        assert read(parser(name), [text]) == read(parser(name), list(text)) == ("", [("ping", {})])


@pytest.mark.parametrize("text", ["a <tool", f"{HERMES_CALL} Or <tool", f"{HERMES_CALL} x</tool"])
def test_the_beginning_of_a_mark_behind_other_text_is_text(text: str) -> None:
    for pieces in ([text], list(text)):
        content, _ = read(parser("hermes"), pieces)
        assert content == text.removeprefix(HERMES_CALL).lstrip()


def test_text_before_a_call_that_is_cut_is_kept() -> None:
    text = f'{HERMES_CALL}\nAnd then:\n<tool_call>\n{{"name": "pi'
    for pieces in ([text], list(text)):
        assert read(parser("hermes"), pieces) == ("And then:", [("ping", {})])


def test_a_call_is_told_as_soon_as_it_is_closed() -> None:
    reading = parser("hermes")
    assert reading.feed('<tool_call>{"name": "ping"').calls == []
    assert joined(reading.feed("}").calls) == [("ping", {})]


def test_only_the_first_call_counts_if_they_may_not_be_parallel() -> None:
    text = "[ping(), get_w(city='x')]"
    assert read(parser("pythonic", is_parallel=False), [text]) == ("", [("ping", {})])


def test_arguments_keep_characters_beyond_ascii_as_they_are() -> None:
    parsed = parser("hermes").feed(
        '<tool_call>{"name": "get_w", "arguments": {"city": "Zürich 東"}}</tool_call>'
    )
    assert "".join(part.arguments for part in parsed.calls) == '{"city": "Zürich 東"}'


_FRAGMENTS = st.sampled_from(
    [
        *(text for _, text, _, _ in FOUND),
        *(text for texts in NO_CALLS.values() for text in texts if len(text) < 100),
        *(" ", "\n", "Hi", "<", "<tool_", "call>", "{", "}", "[", "]", '"', "\\", ";", ",", "é"),
    ]
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_does_not_matter_how_the_text_is_cut(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(_FRAGMENTS, max_size=5)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    whole = in_order(parser(name), [text])
    assert in_order(parser(name), pieces) == whole
    assert in_order(parser(name), list(text)) == whole


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen2.5-7B-Instruct", "hermes"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "hermes"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json"),
        ("meta-llama/Llama-4-Scout", "pythonic"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("smollm2", None),
    ],
)
def test_the_name_of_a_model_tells_its_format(model: str, name: str | None) -> None:
    wanted = Parsers(tool_calls=name).call_format(model) if name else None
    assert Parsers(tool_calls="auto").call_format(model) is wanted


def test_an_unknown_format_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match="hermes, llama3_json, mistral, pythonic, qwen3"):
        Parsers(tool_calls="foo")
    with pytest.raises(ConfigError, match="deepseek_r1, qwen3"):
        Parsers(reasoning="foo")
