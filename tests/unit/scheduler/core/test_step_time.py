"""The step-time target: the cost model learns, the budget follows."""

from __future__ import annotations

import pytest

from services.common.sampling import SamplingParams
from services.scheduler.core.caps import LongPrefillCap, TokenBudget
from services.scheduler.core.cost_model import StepCostModel
from services.scheduler.core.request import Request

DECODE_S = 0.030
PREFILL_TOKEN_S = 0.0002


def _taught(model: StepCostModel, *, num_prefill_tokens: int = 500) -> StepCostModel:
    for _ in range(20):
        model.observe(num_decode_rows=16, num_prefill_tokens=0, device_s=DECODE_S)
        model.observe(
            num_decode_rows=16,
            num_prefill_tokens=num_prefill_tokens,
            device_s=DECODE_S + num_prefill_tokens * PREFILL_TOKEN_S,
        )
    return model


def _budget(model: StepCostModel, *, target_s: float | None) -> TokenBudget:
    return TokenBudget(2048, target_s=target_s, min_prefill_tokens=16, cost_model=model)


def test_the_model_learns_what_decoding_and_a_prompt_token_cost() -> None:
    model = _taught(StepCostModel())
    assert model.predict(num_decode_rows=16, num_prefill_tokens=0) == pytest.approx(DECODE_S)
    assert model.predict(num_decode_rows=16, num_prefill_tokens=100) == pytest.approx(
        DECODE_S + 100 * PREFILL_TOKEN_S
    )
    assert model.prefill_tok_s == pytest.approx(1 / PREFILL_TOKEN_S)
    assert model.decode_tok_s == pytest.approx(16 / DECODE_S)


def test_nothing_measured_predicts_nothing_and_limits_nothing() -> None:
    model = StepCostModel()
    assert model.predict(num_decode_rows=3, num_prefill_tokens=100) == 0.0
    assert (model.prefill_tok_s, model.decode_tok_s) == (0.0, 0.0)
    assert _budget(model, target_s=0.05).for_step(3) == 2048


def test_a_target_sizes_the_prompt_share_of_a_step_so_that_it_is_met() -> None:
    budget = _budget(_taught(StepCostModel()), target_s=0.060).for_step(16)
    assert budget == pytest.approx(16 + (0.060 - DECODE_S) / PREFILL_TOKEN_S, abs=2)


def test_a_step_in_which_nobody_decodes_is_not_limited() -> None:
    assert _budget(_taught(StepCostModel()), target_s=0.060).for_step(0) == 2048


def test_without_a_target_the_budget_is_the_maximum() -> None:
    assert _budget(_taught(StepCostModel()), target_s=None).for_step(16) == 2048


def test_prompts_get_a_block_a_step_even_where_decoding_alone_exceeds_the_target() -> None:
    assert _budget(_taught(StepCostModel()), target_s=0.010).for_step(16) == 16 + 16


def test_a_model_that_becomes_slower_is_followed() -> None:
    model = _taught(StepCostModel())
    for _ in range(30):
        model.observe(num_decode_rows=16, num_prefill_tokens=0, device_s=2 * DECODE_S)
    assert model.predict(num_decode_rows=16, num_prefill_tokens=0) == pytest.approx(
        2 * DECODE_S, rel=0.1
    )


def test_the_long_prefill_cap_limits_one_prompt() -> None:
    request = Request(
        handle=1,
        request_id="r",
        prompt_ids=[1],
        sampling=SamplingParams(),
        root_key=b"",
        arrival_s=0.0,
    )
    cap = LongPrefillCap(100)
    assert (cap(request, 300), cap(request, 30)) == (100, 30)
