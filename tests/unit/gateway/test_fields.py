"""Every field of OpenAI's and vLLM's API works, is accepted as documented, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.gateway.generation import GenerationRequest
from services.gateway.openai.responses.schema import ResponseRequest
from services.gateway.openai.schema import ChatCompletionRequest, CommonBody, CompletionRequest
from tests.unit.gateway.desk import Desk
from tests.unit.gateway.field_status import OPENAI, Status, plan_of, status

ROUTES = (ChatCompletionRequest, CompletionRequest, ResponseRequest)
# vLLM 0.32: "extra parameters" of both routes, then those of one.
VLLM = [
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "allowed_token_ids",
    "prompt_logprobs",
    "logprob_token_ids",
    "bad_words",
    "add_special_tokens",
    "structured_outputs",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "thinking_token_budget",
    "stream_interval",
]
VLLM_OF = {
    ChatCompletionRequest: [
        "reasoning_effort",
        "include_reasoning",
        "echo",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "return_prompt_text",
    ],
    CompletionRequest: ["prompt_embeds", "response_format", "suffix"],
    ResponseRequest: [
        "include_reasoning",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "enable_response_messages",
        "previous_input_messages",
    ],
}
ACCEPTED: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "request_id": "mine",
    "prediction": {"type": "content", "content": "x"},
    "store": True,
    "max_tool_calls": 3,
    "stream_options": {"include_obfuscation": True},
}


# Accepted by the other routes, and more than that here.
WORKS_ELSEWHERE: dict[type[CommonBody], set[str]] = {
    ChatCompletionRequest: {"stream_options"},
    CompletionRequest: {"stream_options"},
    ResponseRequest: {"store"},
}


@pytest.mark.parametrize("route", ROUTES)
def test_no_field_of_openai_s_client_is_unknown(route: type[CommonBody]) -> None:
    assert len(OPENAI[route]) > 15
    assert {name for name in OPENAI[route] if status(route, name) is Status.IGNORED} == set()


@pytest.mark.parametrize("route", ROUTES)
def test_no_field_of_vllm_is_unknown(route: type[CommonBody]) -> None:
    names = [*VLLM, *VLLM_OF[route]]
    assert [name for name in names if status(route, name) is Status.IGNORED] == []


@pytest.mark.parametrize("route", ROUTES)
def test_a_field_is_accepted_only_if_it_is_documented_as_such(route: type[CommonBody]) -> None:
    accepted = {name for name in route.model_fields if status(route, name) is Status.ACCEPTED}
    works = WORKS_ELSEWHERE[route]
    assert accepted == (ACCEPTED.keys() & route.model_fields.keys()) - works


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_accepted_without_effect_has_none(route: type[CommonBody]) -> None:
    names = (ACCEPTED.keys() & route.model_fields.keys()) - WORKS_ELSEWHERE[route]
    given = {name: ACCEPTED[name] for name in names}
    assert _request(route, given | {"seed": 1}) == _request(route, {"seed": 1})


def _request(route: type[CommonBody], fields: dict[str, Any]) -> GenerationRequest:
    (request,) = plan_of(route, **fields).requests
    return replace(request, request_id="")


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_a_field_of_a_message_that_would_be_lost_is_refused_by_name(desk: Desk, name: str) -> None:
    message = {"role": "assistant", "content": "Hi"}
    with pytest.raises(InvalidRequest) as caught:
        desk.chat(messages=[message | {name: {"id": "x"}}])
    assert caught.value.param == f"messages[0].{name}"
    desk.chat(messages=[message | {name: None}])
