"""POST /v1/chat/completions: what is asked of the tokenizer and what comes back."""

from __future__ import annotations

import orjson
import pytest

from services.common.pb import common_pb2 as pb
from tests.fakes.tokenizer import Script
from tests.unit.gateway.desk import Desk


def test_a_chat_is_answered_with_text_finish_and_usage(desk: Desk) -> None:
    desk.script = Script(cached_tokens=1)
    reply = desk.chat()
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake"
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_streamed_chat_is_role_text_finish_done(desk: Desk) -> None:
    first, *middle, last, done = desk.chat_events()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"]["content"] for c in middle] == ["Hello", ",", " world", "!"]
    assert all(c["choices"][0]["finish_reason"] is None for c in (first, *middle))
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert {c["object"] for c in (first, *middle, last)} == {"chat.completion.chunk"}
    assert len({c["id"] for c in (first, *middle, last)}) == 1
    assert "usage" not in first
    assert done == "[DONE]"


def test_include_usage_adds_one_chunk_without_choices(desk: Desk) -> None:
    options = {"include_usage": True}
    *chunks, usage, done = desk.chat_events(stream_options=options)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks)
    assert done == "[DONE]"


def test_continuous_usage_grows_over_all_choices(desk: Desk) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = desk.chat_events(n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4 + 5
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}


def test_n_choices_have_their_own_text_and_share_the_prompt_in_usage(desk: Desk) -> None:
    reply = desk.chat(n=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert texts == ["Hello, world!", "1:Hello, world!", "2:Hello, world!"]
    assert reply["usage"]["prompt_tokens"] == 2
    assert reply["usage"]["completion_tokens"] == 4 + 5 + 5


def test_each_choice_of_a_stream_has_one_role_and_one_finish(desk: Desk) -> None:
    *chunks, _ = desk.chat_events(n=3)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [("role" in c["delta"]) for c in mine] == [True] + [False] * (len(mine) - 1)
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 2}, 2),
        ({"max_completion_tokens": 2, "max_tokens": 50}, 2),
        ({}, None),
    ],
)
def test_max_tokens_reaches_the_tokenizer(
    desk: Desk, fields: dict[str, int], wanted: int | None
) -> None:
    desk.chat(**fields)
    sampling = desk.requests[0].sampling
    assert (sampling.max_tokens if sampling.HasField("max_tokens") else None) == wanted


def test_messages_tools_and_template_variables_reach_the_tokenizer_as_they_came(
    desk: Desk,
) -> None:
    messages = [
        {"role": "system", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [_call()]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    desk.chat(
        messages=messages,
        tools=tools,
        tool_choice="none",
        chat_template_kwargs={"x": 1},
        reasoning_effort="low",
    )
    chat = desk.requests[0].chat
    assert orjson.loads(chat.messages_json) == messages
    assert orjson.loads(chat.tools_json) == tools
    assert orjson.loads(chat.template_kwargs_json) == {"x": 1, "reasoning_effort": "low"}
    assert chat.add_generation_prompt is True
    assert chat.continue_final_message is False


def _call() -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_final_message_can_be_continued(desk: Desk) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The "}]
    desk.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    chat = desk.requests[0].chat
    assert chat.continue_final_message is True
    assert chat.add_generation_prompt is False


def test_every_sampling_field_reaches_the_tokenizer(desk: Desk) -> None:
    desk.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-5,
        min_tokens=1,
        max_tokens=3,
        ignore_eos=True,
        stop=["END"],
        stop_token_ids=[17],
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        allowed_token_ids=[1, 2],
        bad_words=["no"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        truncate_prompt_tokens=9,
        priority=-2,
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
    )
    request = desk.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.seed, sampling.min_tokens) == (0.1, -5, 1)
    assert sampling.ignore_eos is True
    assert list(sampling.stop_token_ids) == [17]
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert sampling.repetition_penalty == 1.1
    assert dict(zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True)) == {
        5: -100,
        6: 1.5,
    }
    assert list(sampling.allowed_token_ids.ids) == [1, 2]
    assert sampling.repetition_detection.max_pattern_size == 4
    assert sampling.repetition_detection.min_pattern_size == 1
    assert list(request.stop) == ["END"]
    assert list(request.bad_words) == ["no"]
    assert request.include_stop is True
    assert request.skip_special_tokens is False
    assert request.spaces_between_special_tokens is False
    assert request.truncate_prompt_tokens == 9
    assert request.priority == -2


def test_a_request_without_a_seed_gets_one_of_its_own(desk: Desk) -> None:
    for _ in range(2):
        desk.chat()
    first, second = (request.sampling for request in desk.requests)
    assert first.HasField("seed") and second.HasField("seed")
    assert first.seed != second.seed


def test_null_means_not_given(desk: Desk) -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "max_tokens", "logprobs", "tools", "response_format")
    )
    desk.chat(**nulls)
    assert desk.requests[0].sampling.temperature == 1.0
    assert desk.requests[0].n == 1


@pytest.mark.parametrize(
    ("stop", "told"), [("STOP", "STOP"), (17, 17), (None, None)], ids=["string", "token", "eos"]
)
def test_what_stopped_a_choice_is_told(
    desk: Desk, stop: str | int | None, told: str | int | None
) -> None:
    desk.script = Script(stop=stop)
    assert desk.chat()["choices"][0]["stop_reason"] == told
    *_, last, _ = desk.chat_events()
    assert last["choices"][0]["stop_reason"] == told


def test_a_choice_cut_by_max_tokens_ends_with_length(desk: Desk) -> None:
    reply = desk.chat(max_tokens=2)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"]["content"] == "Hello,"
    assert reply["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "kind", "spec"),
    [
        (
            {"response_format": {"type": "json_object"}},
            pb.CONSTRAINT_KIND_JSON_OBJECT,
            "",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "integer"}, "strict": True},
                }
            },
            pb.CONSTRAINT_KIND_JSON_SCHEMA,
            '{"type":"integer"}',
        ),
        (
            {"structured_outputs": {"json": {"type": "integer"}}},
            pb.CONSTRAINT_KIND_JSON_SCHEMA,
            '{"type":"integer"}',
        ),
        (
            {"structured_outputs": {"json": '{"type": "integer"}'}},
            pb.CONSTRAINT_KIND_JSON_SCHEMA,
            '{"type":"integer"}',
        ),
        ({"structured_outputs": {"regex": "a+"}}, pb.CONSTRAINT_KIND_REGEX, "a+"),
        ({"structured_outputs": {"choice": ["é", "b"]}}, pb.CONSTRAINT_KIND_CHOICE, '["é","b"]'),
        (
            {"structured_outputs": {"grammar": "start: /a/"}},
            pb.CONSTRAINT_KIND_GRAMMAR,
            "start: /a/",
        ),
        ({"structured_outputs": {"json_object": True}}, pb.CONSTRAINT_KIND_JSON_OBJECT, ""),
    ],
)
def test_a_constraint_reaches_the_tokenizer(
    desk: Desk, fields: dict[str, object], kind: int, spec: str
) -> None:
    desk.chat(**fields)
    constraint = desk.requests[0].constraint
    assert (constraint.kind, constraint.spec) == (kind, spec)


def test_response_format_text_is_no_constraint(desk: Desk) -> None:
    desk.chat(response_format={"type": "text"})
    assert not desk.requests[0].HasField("constraint")


def test_harmless_fields_are_accepted(desk: Desk) -> None:
    plain = desk.chat()["choices"]
    reply = desk.chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        parallel_tool_calls=True,
        tools=[],
        modalities=["text"],
        foo=1,
    )
    assert reply["choices"] == plain


def test_a_request_without_a_model_means_the_one_that_is_served(desk: Desk) -> None:
    assert desk.chat(model=None)["model"] == "fake"
    assert desk.requests[0].model == "fake"


def test_token_ids_are_returned_if_asked_for(desk: Desk) -> None:
    reply = desk.chat(return_token_ids=True)
    ids = reply["choices"][0]["token_ids"]
    assert desk.vocabulary.decode(ids) == "Hello, world!"
    assert len(reply["prompt_token_ids"]) == 2
    first, *middle, _, _ = desk.chat_events(return_token_ids=True)
    assert first["prompt_token_ids"] == reply["prompt_token_ids"]
    assert [i for c in middle for i in c["choices"][0]["token_ids"]] == ids


def test_newlines_and_non_ascii_text_stay_on_one_data_line(desk: Desk) -> None:
    desk.script = Script(tokens=("\n", "\r\n", "é", "\u2028", "🌶"))
    *chunks, _ = desk.chat_events()
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "\n\r\né\u2028🌶"


def test_a_character_spread_over_tokens_comes_whole(desk: Desk) -> None:
    desk.script = Script(tokens=(b"\xf0\x9f", b"\x8c", b"\xb6", "!"))
    *chunks, _ = desk.chat_events()
    deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == "🌶!"
