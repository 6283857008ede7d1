"""Bad input: refused with 400 and the name of the field, before a tokenizer hears of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from services.gateway.body import parse_object
from services.gateway.fleet import Fleet
from services.gateway.openai.chat import plan_chat
from services.gateway.openai.completions import plan_completion
from services.gateway.openai.fields import UnknownFields
from services.gateway.openai.plan import Caller, Plan, PlanContext
from services.gateway.parsers import Parsers
from tests.fakes.tokenizer import MODEL, VOCAB_SIZE
from tests.unit.gateway.desk import planning

HI = [{"role": "user", "content": "Hi"}]
VOCAB = VOCAB_SIZE


def chat(**fields: Any) -> Plan:
    """Plan a chat."""
    return plan_chat({"model": MODEL, "messages": HI} | fields, Caller(), planning(), now=0)


def completion(**fields: Any) -> Plan:
    """Plan a completion."""
    return plan_completion({"model": MODEL, "prompt": "x"} | fields, Caller(), planning(), now=0)


SAMPLING = [
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", -0.1),
    ("temperature", [1]),
    ("temperature", 101),
    ("top_p", 1.5),
    ("top_p", 0),
    ("top_p", "1"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_k", 2**40),
    ("min_p", -1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", 99),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("seed", 2**63),
    ("seed", float(2**64)),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("seed", True),
    ("seed", "7"),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "10"),
    ("max_tokens", 2**40),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", "1"),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", 5),
    ("stop_token_ids", list(range(129))),
    ("logit_bias", {"1000": 5}),
    ("logit_bias", {"250000": -100}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 5}),
    ("logit_bias", {"1" * 30: 5}),
    ("logit_bias", {"٣": 5}),
    ("logit_bias", {"17": "x"}),
    ("logit_bias", {"17": 1e9}),
    ("logit_bias", {"17": True}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", [-5]),
    ("allowed_token_ids", [1.5]),
    ("bad_words", ["ok", ""]),
    ("bad_words", [" "]),
    ("bad_words", "word"),
    ("bad_words", ["w"] * 129),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("n", 10**9),
    ("n", True),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["ok", 5]),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop", ["s"] * 129),
    ("stop", ["s" * 1025]),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("priority", 2**31),
    ("priority", 1.5),
    ("cache_salt", ""),
    ("cache_salt", "s" * 1025),
    ("cache_salt", 5),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", "5"),
    ("user", 5),
    ("metadata", "m"),
    ("response_format", "json"),
    ("response_format", {"type": "xml"}),
    ("response_format", {}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "schema": {"type": "object"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": "x"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": [""]}),
    ("structured_outputs", {"choice": "yes"}),
    ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json": "[1]"}),
    ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}),
    ("structured_outputs", {"structural_tag": "{}"}),
    ("repetition_detection", {"max_pattern_size": 4}),
    ("repetition_detection", {"max_pattern_size": 4, "min_count": 1}),
    ("repetition_detection", {"max_pattern_size": -1, "min_count": 2}),
    ("repetition_detection", {"max_pattern_size": 2**31, "min_count": 2}),
    ("repetition_detection", {"max_pattern_size": 4, "min_count": 2**31}),
    ("use_beam_search", True),
    ("length_penalty", 1.5),
    ("suffix", "x"),
    ("logprob_token_ids", [1]),
    ("guided_json", {"type": "integer"}),
    ("guided_choice", ["a"]),
    ("kv_transfer_params", {}),
    ("stream_interval", 5),
    ("thinking_token_budget", 5),
]


@pytest.mark.parametrize(("field", "value"), SAMPLING)
@pytest.mark.parametrize("plan", [chat, completion])
def test_a_bad_value_is_refused_by_name(plan: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(**{field: value})
    assert caught.value.http_status == 400
    assert (caught.value.param or "").split(".")[0].split("[")[0] == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_tokens", 10**30, "[1, 2147483647]"),
        ("seed", 2**64, "[-9223372036854775808, 9223372036854775807]"),
        ("seed", -(10**30), "[-9223372036854775808, 9223372036854775807]"),
        ("top_k", 10**20, "[-1, 2147483647]"),
        ("priority", 10**30, "[-2147483648, 2147483647]"),
        ("n", 10**30, "[1, 8]"),
        ("stop_token_ids", [10**30, 10**30], f"0..{VOCAB - 1}"),
    ],
)
@pytest.mark.parametrize("plan", [chat, completion])
def test_an_integer_of_more_than_64_bits_is_told_the_range_of_its_field(
    plan: Any, field: str, value: Any, allowed: str
) -> None:
    read = parse_object(json.dumps({field: value}).encode())
    with pytest.raises(InvalidRequest) as caught:
        plan(**read)
    assert caught.value.param == field
    assert allowed in caught.value.message
    if isinstance(value, int) and value != 2**64:  # the digits that a float keeps
        assert caught.value.message.endswith(f"got {value}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"messages": None}, "messages must be a list, got null"),
        ({"messages": [{}]}, "messages[0].role is required"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content must be text or a list, got 5",
        ),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            "messages[0].content[0] must be an object, got 5",
        ),
        ({"messages": HI * 16385}, "messages has 16385 entries; at most 16384 are allowed"),
        ({"response_format": "json"}, "response_format must be an object, got 'json'"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type must be 'text', 'json_object' or 'json_schema', got 'xml'",
        ),
        ({"logit_bias": [1]}, "logit_bias must be an object, got a list"),
        ({"temperature": True}, "temperature must be a number, got true"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"stream": 1}, "stream must be true or false, got 1"),
        (
            {"structured_outputs": {"json": 5}},
            "structured_outputs.json must be an object or text, got 5",
        ),
    ],
)
def test_a_wrong_type_or_length_is_told_in_words_of_the_request(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.message == message


def test_a_rule_against_repetition_that_means_nothing_is_refused_by_its_part() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(repetition_detection={"max_pattern_size": -1, "min_count": 2})
    assert caught.value.message == (
        "repetition_detection.max_pattern_size must be in [1, 2147483647], got -1"
    )


CHAT_ONLY = [
    ("messages", []),
    ("messages", None),
    ("messages", "hi"),
    ("messages", [{}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": {"a": 1}}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": []}]),
    ("messages", [{"role": "user", "content": ["Hi"]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages", [{"role": 1, "content": "x"}]),
    ("messages", [{"role": "foo", "content": "x"}]),
    ("messages", [{"role": "user", "content": "x", "name": 5}]),
    ("messages", [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]),
    ("messages", [[[[[]]]]]),
    ("logprobs", 1),
    ("top_logprobs", 2),
    ("max_completion_tokens", 0),
    ("max_completion_tokens", -1),
    ("max_completion_tokens", "5"),
    ("max_tokens", 0),
    ("chat_template", "{% for i in range(99999) %}x{% endfor %}"),
    ("chat_template_kwargs", {"chat_template": "x"}),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", "x"),
    ("modalities", ["audio"]),
    ("audio", {"voice": "x"}),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("web_search_options", {}),
    ("echo", True),
    ("add_special_tokens", True),
    ("tools", "f"),
    ("tools", [{"type": "code"}]),
    ("tool_choice", "required"),
]


@pytest.mark.parametrize(("field", "value"), CHAT_ONLY)
def test_a_bad_value_in_chat_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert (caught.value.param or "").split(".")[0].split("[")[0] == field
    assert field in caught.value.message


@pytest.mark.parametrize("value", [21, 1001, -1, True, 2.5])
def test_top_logprobs_must_be_a_small_number(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(logprobs=True, top_logprobs=value)
    assert caught.value.param == "top_logprobs"


COMPLETION_ONLY = [
    ("prompt", ""),
    ("prompt", [""]),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {"a": 1}),
    ("prompt", [VOCAB]),
    ("prompt", [999999]),
    ("prompt", [-1]),
    ("prompt", [4611686018427387905]),
    ("prompt", [5, -1]),
    ("prompt", [5, True]),
    ("prompt", [5, "x"]),
    ("prompt", [5, 1.5]),
    ("prompt", [None]),
    ("prompt", [["x"]]),
    ("prompt", [True]),
    ("prompt", ["x"] * 17),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("logprobs", 1.5),
    ("max_tokens", 0),
    ("max_completion_tokens", 5),
    ("best_of", 2),
    ("echo", 1),
]


@pytest.mark.parametrize(("field", "value"), COMPLETION_ONLY)
def test_a_bad_value_in_completions_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field: value})
    assert (caught.value.param or "").split(".")[0].split("[")[0] == field


def test_ids_outside_the_vocabulary_are_told_as_such() -> None:
    with pytest.raises(InvalidRequest, match=r"vocabulary \(0\.\.999\)"):
        completion(prompt=[5, 1000])


def test_an_error_names_the_very_place() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[*HI, {"role": "user", "content": [{"type": "text", "text": 5}]}])
    assert caught.value.param == "messages[1].content[0].text"
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[*HI, {"role": "foo", "content": "x"}])
    assert caught.value.param == "messages[1].role"


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(min_tokens=9, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_too_many_choices_over_all_prompts_are_refused() -> None:
    assert len(completion(prompt=["x"] * 4, n=4).requests) == 4
    with pytest.raises(InvalidRequest, match="20 choices"):
        completion(prompt=["x"] * 4, n=5)


def test_two_constraints_are_one_too_many() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param", "spelling"),
    [
        ({"response_format": {"type": "json_object"}}, "constraint", "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "constraint", "structured_outputs"),
        ({"max_completion_tokens": 5, "max_tokens": 9}, "max_tokens", "max_completion_tokens"),
        ({"max_tokens": 9}, "max_tokens", "max_tokens"),
        ({}, "messages", "messages"),
    ],
)
def test_errors_of_other_services_name_the_client_s_field(
    fields: dict[str, Any], param: str, spelling: str
) -> None:
    error = chat(**fields).in_client_words(ContextLengthExceeded("it is no good", param=param))
    assert isinstance(error, ContextLengthExceeded)
    assert error.param == spelling
    assert "it is no good" in error.message
    assert (spelling in error.message) is (spelling != param)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_that_does_not_fit_is_told_with_the_field_that_asks_for_it(name: str) -> None:
    said = "the prompt has 5 tokens and max_tokens asks for 9 more; lower max_tokens"
    error = chat(**{name: 9}).in_client_words(ContextLengthExceeded(said, param="max_tokens"))
    assert error.message == said.replace("max_tokens", name)
    assert error.param == name


def test_continuing_and_opening_a_turn_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


def test_prompt_logprobs_are_not_streamed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt_logprobs=1, stream=True)
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("plan", [chat, completion])
def test_an_unknown_model_is_not_found(plan: Any) -> None:
    with pytest.raises(ModelNotFound) as caught:
        plan(model="nope")
    assert caught.value.code == "model_not_found"
    with pytest.raises(InvalidRequest) as refused:
        plan(model=5)
    assert refused.value.param == "model"


def test_before_any_tokenizer_is_known_nothing_is_not_found() -> None:
    nothing = PlanContext(
        Fleet(clock=lambda: 0.0), planning().limits, UnknownFields(), b"", Parsers()
    )
    with pytest.raises(Unavailable):
        plan_chat({"model": MODEL, "messages": HI}, Caller(), nothing, now=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", False),
        ("length_penalty", 1.0),
        ("suffix", None),
        ("truncation_side", "left"),
        ("stream_interval", 1),
        ("best_of", 1),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 100000),
        ("temperature", 0),
        ("temperature", 1),
        ("temperature", 1e-10),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("seed", 0),
        ("stop", []),
        ("stop", None),
        ("stop", "x"),
        ("allowed_token_ids", [5, 5]),
        ("repetition_detection", {"max_pattern_size": 0, "min_count": 0}),
    ],
)
@pytest.mark.parametrize("plan", [chat, completion])
def test_values_that_mean_something_or_nothing_are_taken(plan: Any, field: str, value: Any) -> None:
    plan(**{field: value})


def test_a_template_of_the_request_is_taken_if_the_server_trusts_it() -> None:
    trusting = planning(trusts_templates=True)
    body = {"model": MODEL, "messages": HI, "chat_template": "T"}
    (request,) = plan_chat(body, Caller(), trusting, now=0).requests
    assert request.prompt.chat_template == "T"  # type: ignore[union-attr]


def test_an_unknown_field_is_logged_once_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    known = planning()
    for _ in range(3):
        plan_chat({"model": MODEL, "messages": HI, "foo": 1}, Caller(), known, now=0)
    assert capsys.readouterr().out.count("foo") == 1


def test_the_number_of_logged_names_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    known = planning()
    extra = {f"field_{i}": 1 for i in range(400)}
    plan_chat({"model": MODEL, "messages": HI} | extra, Caller(), known, now=0)
    assert capsys.readouterr().out.count("field=field_") == 256


def test_namespaces_are_made_of_tenant_and_salt_and_cannot_be_guessed() -> None:
    def namespace(tenant: str, salt: str | None) -> str:
        body = {"model": MODEL, "messages": HI, "cache_salt": salt}
        (request,) = plan_chat(body, Caller(tenant=tenant), planning(), now=0).requests
        return request.cache_namespace

    assert namespace("", None) == ""
    assert namespace("", "a") == namespace("", "a")
    several = {namespace("", "a"), namespace("", "b"), namespace("t", None), namespace("t", "a")}
    assert len(several) == 4
    assert "a" not in several
