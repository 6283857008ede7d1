"""Every transform gives the distribution that transformers' logits processor gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.common.sampling import BadWord, SamplingParams
from tests.unit.worker.sampling.rows import (
    EOS_TOKEN_ID,
    Case,
    make_rows,
    make_sampler,
    random_logits,
)

VOCAB = 500
PROMPT = (5, 9, 9, 40)
OUTPUTS = (17, 60, 17, 61)
# Both sides compute in float32; only the order of a few additions differs.
TOLERANCE = 1e-5


def probabilities(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """What this sampler would draw from."""
    cases = [Case(params, PROMPT, OUTPUTS)]
    sampler = make_sampler(cases, vocab_size=VOCAB)
    return sampler.transformed(logits, make_rows(cases)).softmax(dim=-1)


def reference(processors: list[LogitsProcessor], logits: torch.Tensor) -> torch.Tensor:
    """What transformers would draw from."""
    input_ids = torch.tensor([[*PROMPT, *OUTPUTS]])
    scores = logits.clone()
    for processor in processors:
        scores = processor(input_ids, scores)
    return scores.softmax(dim=-1)


ALLOWED = (3, 17, 60, 100, 101)
BANNED = [token for token in range(VOCAB) if token not in ALLOWED]
BIAS = {17: 3.5, 40: -100.0, 499: 12.0}
BAD_WORDS = ((100,), (17, 61, 5), (61, 200), (17, 99))

CASES: dict[str, tuple[SamplingParams, Callable[[], list[LogitsProcessor]]]] = {
    "allowed_token_ids": (
        SamplingParams(allowed_token_ids=ALLOWED),
        lambda: [SuppressTokensLogitsProcessor(BANNED)],
    ),
    "logit_bias": (
        SamplingParams(logit_bias=BIAS),
        lambda: [SequenceBiasLogitsProcessor([[[k], v] for k, v in BIAS.items()])],
    ),
    "min_tokens": (
        SamplingParams(min_tokens=5),
        lambda: [MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [EOS_TOKEN_ID])],
    ),
    "min_tokens_reached": (
        SamplingParams(min_tokens=4),
        lambda: [MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [EOS_TOKEN_ID])],
    ),
    "min_tokens_with_stop_ids": (
        SamplingParams(min_tokens=5, stop_token_ids=(60, 77), ignore_eos=True),
        lambda: [MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [EOS_TOKEN_ID, 60, 77])],
    ),
    "repetition_penalty": (
        SamplingParams(repetition_penalty=1.7),
        lambda: [RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "repetition_reward": (
        SamplingParams(repetition_penalty=0.6),
        lambda: [RepetitionPenaltyLogitsProcessor(0.6)],
    ),
    "bad_words": (
        SamplingParams(bad_words=tuple(BadWord.of_tokens(*ids) for ids in BAD_WORDS)),
        lambda: [NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS])],
    ),
    "temperature": (SamplingParams(temperature=0.35), lambda: [TemperatureLogitsWarper(0.35)]),
    "min_p": (SamplingParams(min_p=0.07), lambda: [MinPLogitsWarper(0.07)]),
    "top_k": (SamplingParams(top_k=13), lambda: [TopKLogitsWarper(13)]),
    "top_k_of_one": (SamplingParams(top_k=1), lambda: [TopKLogitsWarper(1)]),
    "top_p": (SamplingParams(top_p=0.83), lambda: [TopPLogitsWarper(0.83)]),
    "top_p_tiny": (SamplingParams(top_p=1e-6), lambda: [TopPLogitsWarper(1e-6)]),
    "all_in_order": (
        SamplingParams(
            temperature=1.6,
            top_p=0.9,
            top_k=40,
            min_p=0.01,
            min_tokens=9,
            repetition_penalty=1.3,
            logit_bias=BIAS,
            bad_words=tuple(BadWord.of_tokens(*ids) for ids in BAD_WORDS),
        ),
        lambda: [
            SequenceBiasLogitsProcessor([[[k], v] for k, v in BIAS.items()]),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [EOS_TOKEN_ID]),
            RepetitionPenaltyLogitsProcessor(1.3),
            NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS]),
            TemperatureLogitsWarper(1.6),
            MinPLogitsWarper(0.01),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_distribution_is_that_of_transformers(name: str, seed: int) -> None:
    params, processors = CASES[name]
    logits = random_logits(1, VOCAB, seed=seed)
    ours = probabilities(params, logits)
    theirs = reference(processors(), logits)
    assert ((ours == 0) == (theirs == 0)).all()
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_frequency_and_presence_penalties_count_outputs_only() -> None:
    logits = random_logits(1, VOCAB)
    params = SamplingParams(frequency_penalty=0.7, presence_penalty=-1.1)
    expected = logits.clone()
    for token in set(OUTPUTS):
        expected[0, token] -= 0.7 * OUTPUTS.count(token) - 1.1
    torch.testing.assert_close(
        probabilities(params, logits), expected.softmax(dim=-1), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_penalties_apply_in_the_order_repetition_frequency_presence() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 17] = 2.0
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    cases = [Case(params, PROMPT, OUTPUTS)]
    out = make_sampler(cases, vocab_size=VOCAB).transformed(logits, make_rows(cases))
    assert out[0, 17].item() == 2.0 / 2.0 - 2 * 0.25 - 0.5


def test_top_k_keeps_ties_of_the_kth() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :10] = 1.0
    assert (probabilities(SamplingParams(top_k=4), logits) > 0).sum() == 10
