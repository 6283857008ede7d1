"""Every field of OpenAI's and vLLM's API works, is accepted as documented, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.gateway.generation import GenerationRequest
from services.gateway.openai.plan import Caller, Plan
from services.gateway.openai.schema import ChatCompletionRequest, CompletionRequest, GenerationBody
from tests.fakes.tokenizer import MODEL
from tests.unit.gateway.desk import Desk, planning
from tests.unit.gateway.field_status import OPENAI, PLANS, Status, status

ROUTES = (ChatCompletionRequest, CompletionRequest)
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
}


@pytest.mark.parametrize("route", ROUTES)
def test_no_field_of_openai_s_client_is_unknown(route: type[GenerationBody]) -> None:
    assert len(OPENAI[route]) > 15
    assert {name for name in OPENAI[route] if status(route, name) is Status.IGNORED} == set()


@pytest.mark.parametrize("route", ROUTES)
def test_no_field_of_vllm_is_unknown(route: type[GenerationBody]) -> None:
    names = [*VLLM, *VLLM_OF[route]]
    assert [name for name in names if status(route, name) is Status.IGNORED] == []


@pytest.mark.parametrize("route", ROUTES)
def test_a_field_is_accepted_only_if_it_is_documented_as_such(route: type[GenerationBody]) -> None:
    accepted = {name for name in route.model_fields if status(route, name) is Status.ACCEPTED}
    assert accepted == ACCEPTED.keys() & route.model_fields.keys()


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_accepted_without_effect_has_none(route: type[GenerationBody]) -> None:
    given = {name: value for name, value in ACCEPTED.items() if name in route.model_fields}
    assert _request(route, given | {"seed": 1}) == _request(route, {"seed": 1})


def _request(route: type[GenerationBody], fields: dict[str, Any]) -> GenerationRequest:
    plan, body = PLANS[route]
    made: Plan = plan({"model": MODEL, **body, **fields}, Caller(), planning(), now=0)
    (request,) = made.requests
    return replace(request, request_id="")


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_a_field_of_a_message_that_would_be_lost_is_refused_by_name(desk: Desk, name: str) -> None:
    message = {"role": "assistant", "content": "Hi"}
    with pytest.raises(InvalidRequest) as caught:
        desk.chat(messages=[message | {name: {"id": "x"}}])
    assert caught.value.param == f"messages[0].{name}"
    desk.chat(messages=[message | {name: None}])
