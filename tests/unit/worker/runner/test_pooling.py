"""Rows that pool: one vector, made of all chunks, whoever else is in the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from services.worker.loader.load_model import LoadedModel
from services.worker.runner.step_input import Floats
from tests.unit.worker.runner.driver import GREEDY, Driver, make_runner

PROMPT = [5, 80, 12, 33, 7, 7, 150, 201, 9, 64, 31]
OTHER = [3, 3, 9, 200]


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> Floats:
    model = transformers.AutoModel.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        mean = model(torch.tensor([PROMPT])).last_hidden_state[0].mean(0)
    vector: Floats = torch.nn.functional.normalize(mean, dim=0).numpy()
    return vector


@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
def test_the_vector_comes_with_the_last_chunk_and_is_that_of_transformers(
    loaded: LoadedModel, expected: Floats, chunk: int
) -> None:
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT, pools=True)
    for start in range(0, len(PROMPT), chunk):
        output = driver.step({1: min(chunk, len(PROMPT) - start)})
        assert (output.num_sampled, output.token_ids) == ([0], [])
        assert bool(output.pooled) is (start + chunk >= len(PROMPT))
    np.testing.assert_allclose(output.pooled[1], expected, atol=1e-5)


def test_rows_that_pool_and_rows_that_generate_share_steps(
    loaded: LoadedModel, expected: Floats
) -> None:
    alone = Driver(make_runner(loaded))
    alone.add(2, OTHER, GREEDY)
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT, pools=True)
    driver.add(2, OTHER, GREEDY)
    driver.add(3, PROMPT, pools=True)
    first = driver.step({1: 4, 2: 4, 3: 11})
    second = driver.step({1: 7, 2: 1}, ended=[3])
    assert list(first.pooled) == [3] and list(second.pooled) == [1]
    for vector in (first.pooled[3], second.pooled[1]):
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    assert driver.requests[2].outputs == alone.generate(2, 2)


def test_a_row_that_starts_over_forgets_what_it_had_summed_up(
    loaded: LoadedModel, expected: Floats
) -> None:
    driver = Driver(make_runner(loaded, max_num_seqs=1))
    driver.add(1, PROMPT, pools=True)
    driver.step({1: 6})
    driver.step({}, ended=[1])
    output = driver.step({1: 11})
    np.testing.assert_allclose(output.pooled[1], expected, atol=1e-5)


def test_states_that_are_no_numbers_are_an_error_of_their_row_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = loaded.model.forward

    def spoilt(input_ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        hidden = forward(input_ids, *args, **kwargs)  # type: ignore[arg-type]
        hidden[input_ids == PROMPT[0]] = torch.nan
        return hidden

    monkeypatch.setattr(loaded.model, "forward", spoilt)
    driver = Driver(make_runner(loaded))
    driver.add(1, PROMPT, pools=True)
    driver.add(2, OTHER, pools=True)
    output = driver.step({1: 11, 2: 4})
    assert list(output.row_errors) == [1] and "not finite" in output.row_errors[1].message
    assert list(output.pooled) == [2]
