"""Log-probabilities that a step gives, of outputs and of the prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.sampling import SamplingParams
from services.worker.loader.load_model import LoadedModel
from services.worker.runner.step_output import PromptLogprobChunk
from tests.unit.worker.runner.driver import GREEDY, Driver, make_runner

PROMPT = [5, 80, 12, 33, 7, 7, 150, 201, 9, 64, 31]
TOLERANCE = 1e-4  # float32; products of other batch shapes


def all_logprobs(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """``[len(tokens), vocab]``: log-softmax after each token, from one bare pass."""
    seen: list[torch.Tensor] = []

    class Recorder:
        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            seen.append(loaded.model.forward(*args, **kwargs))
            return seen[-1]

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return loaded.model.compute_logits(hidden)

    driver = Driver(make_runner(replace(loaded, model=Recorder())))
    driver.add(1, tokens)
    driver.step({1: len(tokens)})
    with torch.inference_mode():
        return loaded.model.compute_logits(seen[0]).float().log_softmax(dim=-1)


def test_output_logprobs_describe_the_tokens_of_the_rows_that_asked(loaded: LoadedModel) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT)
    driver.add(2, PROMPT, replace(GREEDY, logprobs=3))
    driver.add(3, PROMPT[:6], replace(GREEDY, logprobs=0))
    output = driver.step({1: 11, 2: 11, 3: 6})
    columns = output.logprobs
    assert columns is not None
    of_token = dict(zip(output.logprob_positions, range(2), strict=True))
    flat = [h for h, n in zip(output.handles, output.num_sampled, strict=True) if n]
    for handle, num_top in ((2, 3), (3, 0)):
        entry = of_token[flat.index(handle)]
        expected = all_logprobs(loaded, driver.requests[handle].tokens[:-1])[-1]
        token = driver.requests[handle].tokens[-1]
        assert columns.logprob[entry] == pytest.approx(expected[token].item(), abs=TOLERANCE)
        assert columns.rank[entry] == 1
        assert columns.num_top[entry] == num_top
    assert len(columns.top_ids) == 3


def test_logprobs_are_those_before_temperature_and_masks(loaded: LoadedModel) -> None:
    params = SamplingParams(temperature=0.5, top_k=1, logprobs=2, allowed_token_ids=(40,))
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT, params)
    output = driver.step({1: 11})
    assert output.logprobs is not None
    expected = all_logprobs(loaded, PROMPT)[-1]
    assert output.token_ids == [40]
    assert output.logprobs.logprob[0] == pytest.approx(expected[40].item(), abs=TOLERANCE)
    assert output.logprobs.rank[0] == int((expected >= expected[40]).sum())


def join(chunks: list[PromptLogprobChunk]) -> list[float]:
    """Values of consecutive chunks; they must be contiguous from token 1."""
    at, values = 1, []
    for chunk in chunks:
        assert chunk.start == at
        at += len(chunk.token_ids)
        values += chunk.columns.logprob.tolist()
    return values


@pytest.mark.parametrize("chunk", [1, 4, 5, 11])
def test_prompt_logprobs_come_in_chunks_as_the_prompt_is_computed(
    loaded: LoadedModel, chunk: int
) -> None:
    driver = Driver(make_runner(loaded))
    request = driver.add(1, PROMPT, replace(GREEDY, prompt_logprobs=2))
    chunks = []
    while not request.outputs:
        rest = len(request.tokens) - request.num_computed
        chunks += driver.step({1: min(rest, chunk)}).prompt_logprobs
    expected = all_logprobs(loaded, PROMPT)
    tokens = [token for part in chunks for token in part.token_ids.tolist()]
    assert tokens == PROMPT[1:]
    assert all((part.columns.num_top == 2).all() for part in chunks)
    np.testing.assert_allclose(
        join(chunks),
        [expected[i, token].item() for i, token in enumerate(PROMPT[1:])],
        atol=TOLERANCE,
    )
    # Outputs are not prompt.
    assert driver.step({1: 1}).prompt_logprobs == []


def test_prompt_logprobs_of_a_long_prompt_are_computed_in_slices(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.runner.prompt_logprobs._SLICE_BYTES", 4 * 320 * 3)
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT, replace(GREEDY, prompt_logprobs=0))
    (chunk,) = driver.step({1: 11}).prompt_logprobs
    expected = all_logprobs(loaded, PROMPT)
    np.testing.assert_allclose(
        chunk.columns.logprob,
        [expected[i, token].item() for i, token in enumerate(PROMPT[1:])],
        atol=TOLERANCE,
    )


def test_a_resumed_request_that_has_its_prompt_logprobs_gets_them_no_more(
    loaded: LoadedModel,
) -> None:
    driver = Driver(make_runner(loaded))
    request = driver.add(1, PROMPT, replace(GREEDY, prompt_logprobs=1))
    request.prompt_logprobs_done = True
    assert driver.step({1: 11}).prompt_logprobs == []
