"""The draws: right distribution, exact tails, decided by their key alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.common.sampling import draw_key
from services.worker.sampling.draw_keys import draw_keys
from services.worker.sampling.gumbel import GumbelDraw
from tests.unit.worker.sampling.rows import CPU, random_logits

KeyColumn = np.ndarray


def keys_of(num: int, *, seed: int = 42, first: int = 0) -> KeyColumn:
    """Keys of ``num`` consecutive positions of one request."""
    positions = np.arange(first, first + num)
    return draw_keys(np.full(num, seed), choices=np.zeros(num, np.int64), positions=positions)


def chi_square_bound(num_cells: int) -> float:
    """Five standard deviations above the mean: a right generator fails once in a million seeds."""
    freedom = num_cells - 1
    return freedom + 5 * math.sqrt(2 * freedom)


def test_keys_equal_the_common_definition() -> None:
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    choices = np.array([0, 1, 2, 3, 127, 5])
    positions = np.array([0, 1, 8191, 2**31, 7, 7])
    expected = [
        draw_key(int(s), choice=int(c), position=int(p))
        for s, c, p in zip(seeds, choices, positions, strict=True)
    ]
    assert draw_keys(seeds, choices=choices, positions=positions).tolist() == expected


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.0, 1.5, 4.0])
def test_draws_follow_the_softmax(scale: float, seed: int) -> None:
    num_draws, vocab = 20_000, 64
    logits = random_logits(1, vocab, seed=seed, scale=scale)
    draw = GumbelDraw(vocab_size=vocab, device=CPU)
    drawn = draw.draw(logits.expand(num_draws, vocab), keys_of(num_draws, seed=seed))
    expected = logits.softmax(dim=-1)[0].double() * num_draws
    # Cells with fewer than five expected draws are pooled, as the test demands.
    counts = torch.bincount(drawn, minlength=vocab).double()
    rare = expected < 5
    pooled_expected = torch.cat([expected[~rare], expected[rare].sum().reshape(1)])
    pooled_counts = torch.cat([counts[~rare], counts[rare].sum().reshape(1)])
    used = pooled_expected > 0
    statistic = ((pooled_counts - pooled_expected) ** 2 / pooled_expected)[used].sum()
    assert statistic < chi_square_bound(int(used.sum()))


def test_noise_has_the_tails_of_a_gumbel() -> None:
    draw = GumbelDraw(vocab_size=50_000, device=CPU)
    noise = torch.cat([draw.noise(keys_of(20, first=20 * i)).flatten() for i in range(5)])
    assert torch.isfinite(noise).all()
    for threshold in (-2.0, -1.0, 0.0, 2.0, 5.0, 8.0, 11.0):
        p = -math.expm1(-math.exp(-threshold))
        expected, sigma = noise.numel() * p, math.sqrt(noise.numel() * p * (1 - p))
        assert abs((noise > threshold).sum().item() - expected) < 5 * sigma + 1, threshold


def test_noise_reaches_18_above_the_mode() -> None:
    # The generator's largest value must lie beyond what a token 18 below the best needs.
    assert -math.log(-math.log1p(-0.5 * 2.0**-31)) > 21


def test_noise_of_neighbouring_keys_is_unrelated() -> None:
    draw = GumbelDraw(vocab_size=20_000, device=CPU)
    noise = draw.noise(keys_of(6)).double()
    noise -= noise.mean(dim=1, keepdim=True)
    noise /= noise.std(dim=1, keepdim=True)
    correlation = noise @ noise.T / noise.shape[1]
    off_diagonal = correlation - torch.diag(correlation.diagonal())
    assert off_diagonal.abs().max() < 5 / math.sqrt(noise.shape[1])
    shifted = (noise[:-1, 1:] * noise[1:, :-1]).mean(dim=1)
    assert shifted.abs().max() < 5 / math.sqrt(noise.shape[1])


def test_every_token_is_drawn_equally_often_under_flat_logits() -> None:
    vocab, num_draws = 1_000, 20_000
    draw = GumbelDraw(vocab_size=vocab, device=CPU)
    drawn = draw.draw(torch.zeros(num_draws, vocab), keys_of(num_draws, seed=9))
    counts = torch.bincount(drawn, minlength=vocab).double()
    expected = num_draws / vocab
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_bound(vocab)


@pytest.mark.parametrize("vocab", [1, 2, 999, 1024, 4097])
def test_minus_infinity_is_never_drawn(vocab: int) -> None:
    logits = torch.full((200, vocab), -torch.inf)
    alive = [0] if vocab == 1 else [0, vocab - 1]
    logits[:, alive] = 0.0
    drawn = GumbelDraw(vocab_size=vocab, device=CPU).draw(logits, keys_of(200))
    assert set(drawn.tolist()) == set(alive)


def test_seed_choice_and_position_each_change_the_draws() -> None:
    vocab, num = 1_000, 50
    logits = torch.zeros(num, vocab)
    draw = GumbelDraw(vocab_size=vocab, device=CPU)
    zeros, positions = np.zeros(num, np.int64), np.arange(num)
    base = draw.draw(logits, draw_keys(zeros, choices=zeros, positions=positions))
    for other in (
        draw_keys(zeros + 1, choices=zeros, positions=positions),
        draw_keys(zeros, choices=zeros + 1, positions=positions),
        draw_keys(zeros, choices=zeros, positions=positions + num),
    ):
        assert (draw.draw(logits, other) == base).sum() < 5
