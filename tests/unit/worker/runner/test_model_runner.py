"""The runner: rows, chunks, resumption, order of application, failures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvariantError
from services.common.sampling import BadWord, SamplingParams
from services.worker.loader.load_model import LoadedModel
from tests.unit.worker.runner.driver import GREEDY, Driver, make_runner

PROMPT = [5, 80, 12, 33, 7, 7, 150, 201, 9, 64, 31]
RANDOM = SamplingParams(temperature=1.3, top_p=0.95, seed=7)
EVERYTHING = SamplingParams(
    temperature=1.1,
    top_p=0.97,
    top_k=60,
    seed=99,
    min_tokens=6,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={17: 1.0},
    bad_words=(BadWord.of_tokens(4), BadWord.of_tokens(17, 18)),
)


def outputs_alone(
    loaded: LoadedModel, prompt: list[int], params: SamplingParams, num: int, choice: int = 0
) -> list[int]:
    """What a request gives with nobody beside it and its prompt in one piece."""
    driver = Driver(make_runner(loaded))
    driver.add(1, prompt, params, choice=choice)
    return driver.generate(1, num)


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_a_chunked_prefill_gives_the_tokens_of_one_piece(
    loaded: LoadedModel, chunk: int, params: SamplingParams
) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT, params)
    assert driver.generate(1, 8, chunk=chunk) == outputs_alone(loaded, PROMPT, params, 8)


def test_a_partial_prefill_samples_nothing(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT)
    output = driver.step({1: 5})
    assert (output.num_sampled, output.token_ids) == ([0], [])
    assert driver.step({1: 6}).num_sampled == [1]


def test_a_row_is_reused_by_the_next_request(loaded: LoadedModel) -> None:
    runner = make_runner(loaded, max_num_seqs=1)
    driver = Driver(runner)
    for handle in range(1, 4):
        prompt = [handle, *PROMPT[: 2 + handle]]
        driver.add(handle, prompt, replace(EVERYTHING, seed=handle))
        got = driver.generate(handle, 5)
        assert runner.num_rows == 1
        assert got == outputs_alone(loaded, prompt, replace(EVERYTHING, seed=handle), 5)
        driver.step({}, ended=[handle])
        assert runner.num_rows == 0


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
@pytest.mark.parametrize("pause_after", [1, 4])
def test_a_resumed_row_goes_on_as_if_never_stopped(
    loaded: LoadedModel, pause_after: int, params: SamplingParams
) -> None:
    expected = outputs_alone(loaded, PROMPT, params, 9)
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT, params)
    driver.generate(1, pause_after)
    driver.step({}, ended=[1])
    assert driver.generate(1, 9) == expected


def test_ended_rows_make_room_for_new_ones_in_the_same_step(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded, max_num_seqs=1))
    driver.add(1, PROMPT)
    driver.step({1: len(PROMPT)})
    driver.add(2, PROMPT)
    assert driver.step({2: len(PROMPT)}, ended=[1]).num_sampled == [1]
    # Preempted and admitted again in one step, whole.
    assert driver.step({2: len(PROMPT) + 1}, ended=[2]).num_sampled == [1]
    assert driver.requests[2].outputs == outputs_alone(loaded, PROMPT, GREEDY, 2)


def test_blocks_are_copied_before_anything_runs(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded))
    first = driver.add(1, PROMPT)
    driver.generate(1, 6)
    second = driver.add(2, PROMPT)
    # Two full blocks and the first half of the third are taken over from the first request.
    second.num_computed = 10
    second.blocks = [first.blocks[0], 400, 401]
    copies = [(first.blocks[1], 400), (first.blocks[2], 401)]
    output = driver.runner.execute(driver.plan({2: 1}, copies=copies))
    driver.take(output)
    assert driver.generate(2, 6) == first.outputs


def test_new_blocks_go_to_the_rows_that_gained_them(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT[:3])
    driver.add(2, PROMPT[:5])
    driver.add(3, PROMPT[:4])
    driver.step({1: 3, 2: 5, 3: 4})
    for _ in range(12):
        driver.step({3: 1, 1: 1, 2: 1})
    for handle, length in ((1, 3), (2, 5), (3, 4)):
        expected = outputs_alone(loaded, PROMPT[:length], GREEDY, 13)
        assert driver.requests[handle].outputs == expected


def test_unknown_handles_sample_nothing(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT)
    driver.step({1: len(PROMPT)})
    driver.add(2, PROMPT)
    ghost = driver.plan({2: 3, 1: 1})
    ghost = replace(
        ghost, new_rows=[], num_new_blocks=np.array([2, 0]), new_block_ids=np.array([90, 91])
    )
    output = driver.runner.execute(ghost)
    assert dict(zip(output.handles, output.num_sampled, strict=True)) == {1: 1, 2: 0}


def test_the_next_step_takes_the_token_from_the_row(loaded: LoadedModel) -> None:
    """Two steps are launched before either is read: the host never carries the token over."""
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT, RANDOM)
    launched = [driver.runner.launch(driver.plan({1: count})) for count in (len(PROMPT), 1, 1)]
    for step in launched:
        driver.take(driver.runner.read(step))
    assert driver.requests[1].outputs == outputs_alone(loaded, PROMPT, RANDOM, 3)


def test_a_row_at_its_length_limit_samples_nothing_more(loaded: LoadedModel) -> None:
    limit = len(PROMPT) + 2
    driver = Driver(make_runner(loaded, max_model_len=limit))
    driver.add(1, PROMPT)
    driver.generate(1, 3)
    assert driver.step({1: 1}).num_sampled == [0]


def test_an_empty_step_only_ends_rows(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT)
    driver.step({1: 4})
    output = driver.step({}, ended=[1])
    assert (output.handles, output.num_tokens, driver.runner.num_rows) == ([], 0, 0)


class NanModel:
    """Gives NaN logits for hidden states of one marked token; counts nothing else."""

    def __init__(self, loaded: LoadedModel, marked: int) -> None:
        self._inner = loaded.model
        self._marked = marked

    def forward(self, input_ids, positions, *, kv_caches, attention):  # type: ignore[no-untyped-def]
        """As the model, but the marked token's state is NaN."""
        hidden = self._inner.forward(
            input_ids, positions, kv_caches=kv_caches, attention=attention
        ).clone()
        hidden[input_ids == self._marked] = torch.nan
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the model."""
        return self._inner.compute_logits(hidden)


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_a_row_with_nan_logits_fails_alone_and_stays_until_it_is_finished(
    loaded: LoadedModel, params: SamplingParams
) -> None:
    marked = 319
    sick = replace(loaded, model=NanModel(loaded, marked))
    driver = Driver(make_runner(sick))
    driver.add(1, PROMPT, params)
    driver.add(2, [*PROMPT, marked], params)
    driver.add(3, PROMPT[:4], params)
    output = driver.step({1: 11, 2: 12, 3: 4})
    assert dict(zip(output.handles, output.num_sampled, strict=True)) == {1: 1, 2: 0, 3: 1}
    assert set(output.row_errors) == {2}
    assert "nan" in output.row_errors[2].message
    # Steps that were on their way count 0 and report no second error.
    output = driver.take(driver.runner.execute(driver.plan({1: 1, 2: 1, 3: 1})))
    assert dict(zip(output.handles, output.num_sampled, strict=True)) == {1: 1, 3: 1, 2: 0}
    assert not output.row_errors
    assert driver.runner.num_rows == 3
    driver.step({}, ended=[2])
    assert driver.runner.num_rows == 2
    assert driver.requests[1].outputs == outputs_alone(loaded, PROMPT, params, 2)


def test_a_failed_step_loses_its_rows_and_no_others(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded))
    for handle in (1, 2, 3):
        driver.add(handle, PROMPT, replace(EVERYTHING, seed=handle))
    driver.step({1: 11, 3: 11})
    # Row 1 is asked for more tokens than it knows: the step fails after row 2 was added.
    broken = driver.plan({2: 11, 1: 5})
    with pytest.raises(InvariantError, match="shall compute 5 tokens"):
        driver.runner.execute(broken)
    driver.runner.forget(broken)
    # The step after it was on its way already.
    in_flight = driver.take(driver.runner.execute(driver.plan({1: 1, 2: 1, 3: 1})))
    assert dict(zip(in_flight.handles, in_flight.num_sampled, strict=True)) == {3: 1, 1: 0, 2: 0}
    # The scheduler preempts the rows of both steps and admits them again.
    driver.step({}, ended=[1, 2, 3])
    for handle in (1, 2, 3):
        expected = outputs_alone(loaded, PROMPT, replace(EVERYTHING, seed=handle), 6)
        assert driver.generate(handle, 6) == expected


def test_a_row_without_blocks_for_its_tokens_fails_the_step_and_writes_nothing(
    loaded: LoadedModel,
) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT)
    step = driver.plan({1: len(PROMPT)})
    short = replace(step.new_rows[0], block_ids=step.new_rows[0].block_ids[:2])
    with pytest.raises(InvariantError, match="has 2 blocks, too few"):
        driver.runner.execute(replace(step, new_rows=[short]))


def test_reset_drops_every_row(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT)
    driver.add(2, PROMPT)
    driver.step({1: 11, 2: 3})
    driver.runner.reset()
    assert driver.runner.num_rows == 0
    again = Driver(driver.runner)
    again.add(1, PROMPT)
    assert again.generate(1, 4) == outputs_alone(loaded, PROMPT, GREEDY, 4)


request_strategy = st.tuples(
    st.lists(st.integers(4, 300), min_size=1, max_size=14),
    st.sampled_from([GREEDY, RANDOM, EVERYTHING]),
    st.integers(0, 2),
)


@settings(max_examples=15)
@given(
    requests=st.lists(request_strategy, min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
)
def test_requests_get_the_same_tokens_in_any_company(
    loaded: LoadedModel, requests: list[tuple[list[int], SamplingParams, int]], seed: int
) -> None:
    """Random chunks, pauses and resumptions; every request must equal its solo run (float32)."""
    rng = np.random.default_rng(seed)
    driver = Driver(make_runner(loaded, max_num_seqs=5, num_blocks=2048))
    for handle, (prompt, params, choice) in enumerate(requests):
        driver.add(handle, prompt, replace(params, seed=params.seed + handle), choice=choice)
    num_outputs = 5
    while True:
        open_ones = [h for h, r in driver.requests.items() if len(r.outputs) < num_outputs]
        if not open_ones:
            break
        chosen = [h for h in open_ones if rng.random() < 0.7] or open_ones[:1]
        in_rows = [h for h, r in driver.requests.items() if r.is_in_row]
        preempted = [h for h in in_rows if rng.random() < 0.1]
        for handle in preempted:
            driver.requests[handle].num_computed = 0
        rest = {h: driver.requests[h] for h in chosen}
        counts = {
            h: int(rng.integers(1, len(r.tokens) - r.num_computed + 1)) for h, r in rest.items()
        }
        driver.step(counts, ended=preempted)
    for handle, (prompt, params, choice) in enumerate(requests):
        seeded = replace(params, seed=params.seed + handle)
        expected = outputs_alone(loaded, prompt, seeded, num_outputs, choice)
        assert driver.requests[handle].outputs == expected
