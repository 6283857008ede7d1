"""Log-probabilities: normalised over the whole vocabulary in float32, with ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.sampling.logprobs import ALL, concatenate, logprobs_of
from tests.unit.worker.sampling.rows import random_logits

VOCAB = 300
TOLERANCE = 1e-5  # float32 sums in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_log_softmax_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(4, VOCAB).to(dtype)
    tokens = torch.tensor([0, 7, 8, 299])
    columns = logprobs_of(logits, tokens, num_top=[0, 0, 0, 0])
    expected = logits.float().log_softmax(dim=-1)
    np.testing.assert_allclose(
        columns.logprob, expected.gather(1, tokens[:, None])[:, 0], atol=TOLERANCE
    )
    assert columns.num_top.tolist() == [0, 0, 0, 0]
    assert columns.top_ids.size == 0


def test_rank_counts_tokens_that_are_no_less_probable() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    logits[0, 10] = 299.0
    ranks = [
        logprobs_of(logits, torch.tensor([token]), num_top=[0]).rank.tolist()
        for token in (299, 10, 298, 0)
    ]
    assert ranks == [[2], [2], [3], [300]]


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    logits = random_logits(3, VOCAB)
    columns = logprobs_of(logits, torch.tensor([1, 2, 3]), num_top=[2, 0, 5])
    assert columns.num_top.tolist() == [2, 0, 5]
    expected = logits.log_softmax(dim=-1)
    best = [expected[0].topk(2), expected[2].topk(5)]
    assert columns.top_ids.tolist() == [i for top in best for i in top.indices.tolist()]
    np.testing.assert_allclose(
        columns.top_logprobs, torch.cat([top.values for top in best]), atol=TOLERANCE
    )


def test_minus_one_asks_for_the_whole_vocabulary_best_first() -> None:
    logits = random_logits(2, VOCAB)
    columns = logprobs_of(logits, torch.tensor([1, 2]), num_top=[ALL, 1])
    assert columns.num_top.tolist() == [VOCAB, 1]
    first = columns.top_logprobs[:VOCAB]
    assert (np.diff(first) <= 0).all()
    assert sorted(columns.top_ids[:VOCAB].tolist()) == list(range(VOCAB))


def test_banned_tokens_are_no_alternatives() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [4, 5]] = torch.tensor([1.0, 2.0])
    columns = logprobs_of(logits, torch.tensor([5]), num_top=[10])
    assert columns.top_ids.tolist() == [5, 4]
    assert np.isfinite(columns.top_logprobs).all()


def test_parts_concatenate_to_the_whole() -> None:
    logits = random_logits(4, VOCAB)
    tokens = torch.tensor([1, 2, 3, 4])
    whole = logprobs_of(logits, tokens, num_top=[3, 1, 0, 2])
    parts = [
        logprobs_of(logits[:2], tokens[:2], num_top=[3, 1]),
        logprobs_of(logits[2:], tokens[2:], num_top=[0, 2]),
    ]
    joined = concatenate(parts)
    for name in ("logprob", "rank", "num_top", "top_ids", "top_logprobs"):
        assert getattr(joined, name).tolist() == getattr(whole, name).tolist()
