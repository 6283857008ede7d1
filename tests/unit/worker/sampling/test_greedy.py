"""The largest logit of each line, natively at each level and in torch."""

from __future__ import annotations

import pytest
import torch

from services.worker.native.isa import LEVELS, IsaSetting, best_level, machine_flags
from services.worker.native.library import load_library
from services.worker.sampling.greedy import Greedy

ISA_SETTINGS = ["off", *(isa.name for isa in LEVELS[: best_level(machine_flags()) + 1])]


@pytest.fixture(params=ISA_SETTINGS)
def greedy(request: pytest.FixtureRequest) -> Greedy:
    isa: IsaSetting = request.param
    return Greedy(load_library(isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1000, 4099])
def test_it_is_the_argmax_and_its_logit(
    greedy: Greedy, vocab_size: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    token_ids, scores = greedy(logits)
    # bfloat16 has many equal values: torch's argmax need not be the first of them, ours is.
    assert torch.equal(scores, logits.float().amax(-1))
    is_best = logits == logits.amax(-1, keepdim=True)
    assert token_ids.tolist() == is_best.int().argmax(-1).tolist()


def test_a_nan_wins_wherever_it_is(greedy: Greedy) -> None:
    for place in (0, 5, 130, 131):
        logits = torch.zeros(2, 132)
        logits[:, 40] = torch.inf
        logits[1, place] = torch.nan
        token_ids, scores = greedy(logits)
        assert token_ids.tolist() == [40, place]
        assert scores[0] == torch.inf
        assert scores[1].isnan()


def test_lines_of_minus_infinity_and_lines_apart_in_memory(greedy: Greedy) -> None:
    logits = torch.full((3, 200), -torch.inf)
    logits[2, 17] = -5.0
    token_ids, scores = greedy(logits[:, :100])
    assert token_ids.tolist() == [0, 0, 17]
    assert scores.tolist() == [-torch.inf, -torch.inf, -5.0]
