"""The step-time target: the cost model learns, the budget follows."""

from __future__ import annotations

import pytest

from services.common.sampling import SamplingParams
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.caps import LongPrefillCap, TokenBudget
from services.scheduler.core.cost_model import StepCostModel
from services.scheduler.core.request import Request
from tests.unit.scheduler.core.harness import Harness, limits

DECODE_S = 0.030
PREFILL_TOKEN_S = 0.0002


def _taught(model: StepCostModel, *, prefill_token_s: float = PREFILL_TOKEN_S) -> StepCostModel:
    for _ in range(20):
        model.observe(num_decode_rows=16, num_prefill_tokens=0, device_s=DECODE_S)
        model.observe(
            num_decode_rows=16,
            num_prefill_tokens=500,
            device_s=DECODE_S + 500 * prefill_token_s,
        )
    return model


def _budget(model: StepCostModel, *, target_s: float) -> TokenBudget:
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
    assert _budget(model, target_s=0.05).for_step(3, num_waiting=1) == 2048


def test_a_target_sizes_the_prompt_share_of_a_step_so_that_it_is_met() -> None:
    budget = _budget(_taught(StepCostModel()), target_s=0.060).for_step(16, num_waiting=1)
    assert budget == pytest.approx(16 + (0.060 - DECODE_S) / PREFILL_TOKEN_S, abs=2)


def test_a_stream_that_is_fast_beside_the_target_keeps_some_of_its_speed() -> None:
    budget = _budget(_taught(StepCostModel()), target_s=1.0).for_step(16, num_waiting=1)
    assert budget == pytest.approx(16 + 2.0 * DECODE_S / PREFILL_TOKEN_S, abs=2)


def test_a_burst_is_not_held_up_by_the_first_of_it_that_decode() -> None:
    budget = _budget(_taught(StepCostModel()), target_s=1.0)
    assert budget.for_step(4, num_waiting=8) == pytest.approx(
        4 + 5 * DECODE_S / PREFILL_TOKEN_S, abs=2
    )
    capped = _budget(_taught(StepCostModel()), target_s=0.060)
    assert capped.for_step(1, num_waiting=100) == pytest.approx(
        1 + (2.5 * 0.060 - DECODE_S) / PREFILL_TOKEN_S, abs=2
    )


def test_where_no_more_wait_than_decode_the_target_is_the_most_that_a_step_may_last() -> None:
    budget = _budget(_taught(StepCostModel()), target_s=0.060)
    for num_waiting in (1, 8, 16):
        assert budget.for_step(16, num_waiting=num_waiting) == pytest.approx(
            16 + (0.060 - DECODE_S) / PREFILL_TOKEN_S, abs=2
        )


def test_a_burst_goes_as_far_beyond_what_small_steps_have_taught_as_it_is_large() -> None:
    model = StepCostModel()
    model.observe(num_decode_rows=0, num_prefill_tokens=60, device_s=60 * PREFILL_TOKEN_S)
    model.observe(num_decode_rows=1, num_prefill_tokens=0, device_s=DECODE_S)
    budget = _budget(model, target_s=1.0)
    assert budget.for_step(4, num_waiting=4) == 4 + 2 * 60
    assert budget.for_step(4, num_waiting=12) == 4 + 3 * 2 * 60


def test_a_step_in_which_nobody_decodes_is_not_limited() -> None:
    assert _budget(_taught(StepCostModel()), target_s=0.060).for_step(0, num_waiting=1) == 2048


def test_without_a_target_the_budget_is_the_maximum() -> None:
    assert _budget(_taught(StepCostModel()), target_s=0.0).for_step(16, num_waiting=1) == 2048


def test_prompts_get_as_long_as_decoding_takes_where_that_alone_nears_the_target() -> None:
    model = _taught(StepCostModel())
    for target_s in (0.010, DECODE_S, 1.5 * DECODE_S):
        budget = _budget(model, target_s=target_s).for_step(16, num_waiting=1)
        assert budget == pytest.approx(16 + DECODE_S / PREFILL_TOKEN_S, abs=2)


def test_prompts_get_a_block_a_step_however_slow_they_are() -> None:
    model = _taught(StepCostModel(), prefill_token_s=1.0)
    assert _budget(model, target_s=0.060).for_step(16, num_waiting=1) == 16 + 16


def test_a_model_that_becomes_slower_is_followed() -> None:
    model = _taught(StepCostModel())
    for _ in range(30):
        model.observe(num_decode_rows=16, num_prefill_tokens=0, device_s=2 * DECODE_S)
    assert model.predict(num_decode_rows=16, num_prefill_tokens=0) == pytest.approx(
        2 * DECODE_S, rel=0.1
    )


@pytest.mark.parametrize("decode_s", [0.012, 0.036, 0.100])
@pytest.mark.parametrize("num_short", [0, 1, 5, 50])
def test_a_long_prompt_after_short_ones_that_cost_nothing_does_not_stop_the_others(
    decode_s: float, num_short: int
) -> None:
    """Reading the weights takes as long as computing 40 tokens: fewer, beside decodes, are free."""

    def step_s(rows: int, num_tokens: int) -> float:
        return decode_s * max(1.0, (rows + num_tokens) / 40)

    model = StepCostModel()
    budget = _budget(model, target_s=10.0)
    for num_tokens, rows in [(31, 0)] + [(0, 4), (31, 4)] * num_short + [(0, 4)] * 20:
        model.observe(
            num_decode_rows=rows, num_prefill_tokens=num_tokens, device_s=step_s(rows, num_tokens)
        )
    left, longest_s, total_s = 1_800, 0.0, 0.0
    while left:
        num_tokens = min(left, budget.for_step(4, num_waiting=1) - 4)
        left -= num_tokens
        taken_s = step_s(4, num_tokens)
        model.observe(num_decode_rows=4, num_prefill_tokens=num_tokens, device_s=taken_s)
        longest_s, total_s = max(longest_s, taken_s), total_s + taken_s
    assert longest_s < 4.0 * decode_s
    assert total_s < 1.3 * step_s(4, 1_800)


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


class MixedWork:
    """Twelve requests decode while a long prompt arrives every two seconds of simulated time.

    A step takes what a two-core machine takes: reading the weights, then so much a prompt token.
    """

    DECODE_S = 0.060
    PROMPT_TOKEN_S = 0.0003
    PROMPT_TOKENS = 3_400
    NUM_LONG = 4

    def __init__(self, *, target_s: float) -> None:
        self.harness = Harness(
            limits(
                num_blocks=2_000,
                block_size=16,
                max_model_len=4_096,
                max_num_seqs=32,
                max_num_batched_tokens=2_048,
                pipeline_depth=2,
                step_time_target_s=target_s,
            ),
            checks=False,
        )
        self.gaps_s: list[float] = []
        self.long_done_s: list[float] = []

    def run(self) -> None:
        """Run it to its end and note what the clients saw."""
        harness = self.harness
        decoding = {self._add([5 + i, *range(20, 50)], 150) for i in range(12)}
        arrivals = [1.0 + 2.0 * i for i in range(self.NUM_LONG)]
        arrived_at: dict[int, float] = {}
        last_token_at: dict[int, float] = {}
        while harness.scheduler.num_unfinished or arrivals:
            if arrivals and harness.now >= arrivals[0]:
                prompt = [7 + len(arrivals), *([9] * (self.PROMPT_TOKENS - 1))]
                arrived_at[self._add(prompt, 4)] = arrivals.pop(0)
            while harness.plan() is not None:
                pass
            plan = harness.in_flight[0]
            harness.step_s = self.DECODE_S + plan.num_prefill_tokens * self.PROMPT_TOKEN_S
            for handle in harness.receive().handles:
                if handle in decoding and handle in last_token_at:
                    self.gaps_s.append(harness.now - last_token_at[handle])
                if handle in arrived_at and handle not in last_token_at:
                    self.long_done_s.append(harness.now - arrived_at[handle])
                last_token_at[handle] = harness.now

    def _add(self, prompt: list[int], max_tokens: int) -> int:
        return self.harness.add(self.harness.request(prompt, max_tokens=max_tokens)).handle


def test_by_default_long_prompts_do_not_make_the_others_stutter() -> None:
    target_s = SchedulerConfig().step_time_target_ms / 1e3
    careful, careless = MixedWork(target_s=target_s), MixedWork(target_s=0.0)
    careful.run()
    careless.run()
    assert max(careless.gaps_s) > 0.6
    assert max(careful.gaps_s) < 1.1 * target_s
    # What the others gain, the prompts do not lose twice over.
    assert len(careful.long_done_s) == MixedWork.NUM_LONG
    assert max(careful.long_done_s) < 1.6 * max(careless.long_done_s)
