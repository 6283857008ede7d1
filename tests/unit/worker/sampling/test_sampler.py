"""The sampler as a whole: greedy, independence of the batch, failing rows, skipping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, RequestFailed
from services.common.sampling import BadWord, SamplingParams
from services.worker.sampling.grammar_mask import GrammarMask, apply_grammar_mask
from services.worker.sampling.sampler import failure_of
from tests.unit.worker.sampling.rows import (
    EOS_TOKEN_ID,
    Case,
    make_rows,
    make_sampler,
    random_logits,
)

VOCAB = 211
GREEDY = SamplingParams(temperature=0.0)


def sample(cases: list[Case], logits: torch.Tensor, **kwargs: GrammarMask) -> list[int]:
    """Tokens of one call; every row must succeed."""
    sampled = make_sampler(cases, vocab_size=VOCAB).sample(logits, make_rows(cases), **kwargs)
    assert torch.isfinite(sampled.scores).all()
    return sampled.token_ids.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_greedy_is_argmax(num_rows: int, dtype: torch.dtype) -> None:
    logits = random_logits(num_rows, VOCAB).to(dtype)
    assert sample([Case(GREEDY)] * num_rows, logits) == logits.float().argmax(dim=-1).tolist()


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [4, 9]] = 1.0
    assert sample([Case(GREEDY), Case(GREEDY)], logits) == [0, 4]


def test_greedy_ignores_top_p_top_k_and_min_p_but_not_bias() -> None:
    logits = random_logits(2, VOCAB)
    best = int(logits[0].argmax())
    plain = Case(SamplingParams(temperature=0.0, top_p=0.1, top_k=3, min_p=0.5))
    biased = Case(SamplingParams(temperature=0.0, logit_bias={8: 100.0}))
    assert sample([plain, biased], logits) == [best, 8]


def test_sampling_does_not_change_the_logits() -> None:
    logits = random_logits(3, VOCAB)
    before = logits.clone()
    params = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.5, min_tokens=3)
    sample([Case(GREEDY), Case(params), Case(params)], logits)
    assert torch.equal(logits, before)


def test_a_row_without_a_feature_is_untouched_by_its_neighbours() -> None:
    busy = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.2,
        logit_bias={1: 5.0},
        allowed_token_ids=(1, 2, 3),
        bad_words=(BadWord.of_tokens(2),),
        min_tokens=4,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=2.0,
    )
    cases = [Case(busy, (1, 2), (3,)), Case(SamplingParams(), (1, 2), (3,))]
    logits = random_logits(2, VOCAB)
    out = make_sampler(cases, vocab_size=VOCAB).transformed(logits, make_rows(cases))
    assert torch.equal(out[1], logits[1])


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 20]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(-5, 5),
    min_tokens=st.sampled_from([0, 6]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.sampled_from([{}, {5: 4.0}]),
    bad_words=st.sampled_from([(), (BadWord.of_tokens(9), BadWord.of_tokens(7, 8))]),
)
cases_strategy = st.lists(
    st.builds(
        Case,
        params=params_strategy,
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        outputs=st.lists(st.integers(0, VOCAB - 1), max_size=9),
        choice=st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40)
@given(cases=cases_strategy, order_seed=st.integers(0, 1000))
def test_a_row_draws_the_same_token_alone_and_in_any_batch(
    cases: list[Case], order_seed: int
) -> None:
    logits = random_logits(len(cases), VOCAB, seed=order_seed)
    alone = [sample([case], logits[i : i + 1])[0] for i, case in enumerate(cases)]
    order = np.random.default_rng(order_seed).permutation(len(cases)).tolist()
    rows = [2 * place + 1 for place in range(len(cases))]
    shuffled = [cases[i] for i in order]
    sampler = make_sampler(shuffled, vocab_size=VOCAB, rows=rows)
    together = sampler.sample(logits[order], make_rows(shuffled, rows=rows)).token_ids.tolist()
    assert together == [alone[i] for i in order]


def test_a_reused_row_forgets_its_earlier_request() -> None:
    logits = random_logits(1, VOCAB)
    banned = SamplingParams(
        temperature=0.5,
        allowed_token_ids=(7,),
        bad_words=(BadWord.of_tokens(8),),
        min_tokens=9,
        top_k=1,
    )
    cases = [Case(banned)]
    sampler = make_sampler(cases, vocab_size=VOCAB)
    assert sampler.sample(logits, make_rows(cases)).token_ids.tolist() == [7]
    sampler.remove(0)
    sampler.add(0, SamplingParams(), choice=0)
    assert torch.equal(sampler.transformed(logits, make_rows(cases)), logits)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, top_k=5), SamplingParams(min_p=0.5)],
    ids=["greedy", "random", "top_p", "min_p"],
)
def test_a_bad_logit_fails_its_row_alone(params: SamplingParams, bad: float) -> None:
    logits = random_logits(3, VOCAB)
    logits[1, 50] = bad
    cases = [Case(params)] * 3
    scores = make_sampler(cases, vocab_size=VOCAB).sample(logits, make_rows(cases)).scores
    assert torch.isfinite(scores).tolist() == [True, False, True]


def test_a_bad_logit_is_not_hidden_by_a_ban() -> None:
    logits = random_logits(1, VOCAB)
    logits[0, 50] = torch.nan
    cases = [Case(SamplingParams(allowed_token_ids=(1, 2)))]
    scores = make_sampler(cases, vocab_size=VOCAB).sample(logits, make_rows(cases)).scores
    failure = failure_of(scores.item())
    assert isinstance(failure, RequestFailed) and "a logit is nan" in failure.message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_every_token_is_banned_fails(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        allowed_token_ids=(5, EOS_TOKEN_ID),
        bad_words=(BadWord.of_tokens(5),),
        min_tokens=2,
    )
    cases = [Case(params), Case(GREEDY)]
    sampled = make_sampler(cases, vocab_size=VOCAB).sample(
        random_logits(2, VOCAB), make_rows(cases)
    )
    assert sampled.scores[0] == -torch.inf
    failure = failure_of(sampled.scores[0].item())
    assert isinstance(failure, InvalidRequest) and "allowed_token_ids" in failure.message
    assert torch.isfinite(sampled.scores[1])


def test_only_allowed_ids_come_out() -> None:
    allowed = (2, 77, 150)
    cases = [Case(SamplingParams(seed=i, allowed_token_ids=allowed)) for i in range(64)]
    assert set(sample(cases, torch.zeros(64, VOCAB))) == set(allowed)


def test_bad_words_match_outputs_and_not_the_prompt() -> None:
    params = SamplingParams(temperature=0.0, bad_words=(BadWord.of_tokens(4, 5),))
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 9.0
    logits[:, 6] = 8.0
    cases = [Case(params, prompt=(1, 4)), Case(params, prompt=(1,), outputs=(4,))]
    assert sample(cases, logits) == [5, 6]


WORD = (
    BadWord(  # "abc" where a, b, c, ab and bc are tokens 1, 2, 3, 12 and 23, and another "c" is 4
        starts=(0, 0, 1, 1, 2, 2), token_ids=(1, 12, 2, 23, 3, 4), ends=(1, 2, 2, 3, 3, 3)
    )
)
SPELLINGS = [(1, 2, 3), (1, 2, 4), (1, 23), (12, 3), (12, 4)]


@given(
    st.lists(st.lists(st.sampled_from([1, 2, 3, 12, 9]), max_size=5), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_the_last_token_of_any_spelling_of_a_bad_word_is_banned_and_no_other(
    texts: list[list[int]], num_prompt: int
) -> None:
    other = BadWord.of_tokens(9, 9, 3)
    params = SamplingParams(bad_words=(WORD, other))
    cases = [
        Case(params, [7, *text[:num_prompt]], text[num_prompt:]) if i % 2 == 0 else Case(GREEDY)
        for i, text in enumerate(texts)
    ]
    out = make_sampler(cases, vocab_size=VOCAB).transformed(
        torch.zeros(len(cases), VOCAB), make_rows(cases)
    )
    for case, line in zip(cases, out, strict=True):
        spellings = [*SPELLINGS, (9, 9, 3)] if case.params is params else []
        expected = {
            spelling[-1]
            for spelling in spellings
            if tuple(case.outputs[len(case.outputs) - len(spelling) + 1 :]) == spelling[:-1]
            and len(case.outputs) >= len(spelling) - 1
        }
        assert set(line.isneginf().nonzero().flatten().tolist()) == expected


def bitmask_of(allowed: list[int]) -> torch.Tensor:
    """One row of a grammar's mask."""
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[allowed] = 1
    packed = np.packbits(bits, bitorder="little").view(np.int32)
    return torch.from_numpy(packed.copy()).unsqueeze(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grammar_mask_bans_all_but_its_tokens(dtype: torch.dtype) -> None:
    logits = random_logits(3, VOCAB).to(dtype)
    before = logits.clone()
    allowed = [0, 31, 32, 63, 210]
    apply_grammar_mask(logits, lines=torch.tensor([1]), bitmask=bitmask_of(allowed))
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == allowed
    assert torch.equal(logits[1, allowed], before[1, allowed])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_the_grammar_mask_comes_before_everything_else() -> None:
    logits = random_logits(2, VOCAB)
    mask = GrammarMask(torch.tensor([1]), bitmask_of([12, 13]), ending_lines=np.array([], int))
    params = SamplingParams(temperature=0.0, logit_bias={14: 100.0, 13: 50.0})
    assert sample([Case(params), Case(params)], logits, grammar=mask) == [14, 13]


def test_min_tokens_and_bans_yield_where_a_grammar_leaves_nothing_but_the_end() -> None:
    bits = bitmask_of([EOS_TOKEN_ID])
    mask = GrammarMask(torch.tensor([1]), bits, ending_lines=np.array([1]))
    params = SamplingParams(temperature=1.0, min_tokens=50, logit_bias={EOS_TOKEN_ID: -100.0})
    logits = random_logits(2, VOCAB)
    assert sample([Case(params), Case(params)], logits, grammar=mask)[1] == EOS_TOKEN_ID
