"""Greedy output equals transformers in float32, token by token, in every mode of the engine.

Each mode asserts that what it is about has happened. The engine runs in this process here; alone
and all at once over HTTP through the five processes is tested in tests/e2e.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.sampling import SamplingParams
from services.offline import LLM, LLMOptions, Output
from tests.integration.prompts import parity_prompts
from tests.integration.reference import NUM_NEW, Reference, reference_of

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
ROOMY = LLMOptions(
    dtype="float32", max_model_len=3_600, max_num_seqs=48, num_gpu_blocks_override=900
)
"""All prompts fit at once."""

SMALL = LLMOptions(
    dtype="float32", max_model_len=1_024, max_num_seqs=48, num_gpu_blocks_override=80
)
"""Forty short prompts fit, but not their outputs."""


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Reference:
    return reference_of(smollm2_dir)


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    return parity_prompts(smollm2_dir)


@pytest.fixture(scope="module")
def short_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """More than forty that take seconds instead of half a minute."""
    short = [ids for ids in prompts if len(ids) < 1_000]
    assert len(short) > 40
    return short


def require_parity(reference: Reference, outputs: Sequence[Output]) -> None:
    for output in outputs:
        reference.require_parity(output.prompt_ids, output.choices[0].token_ids)


def test_all_at_once_and_then_with_a_warm_prefix_cache(
    smollm2_dir: Path, prompts: list[list[int]], reference: Reference
) -> None:
    with LLM(str(smollm2_dir), options=ROOMY) as llm:
        require_parity(reference, llm.generate(prompts, GREEDY))
        assert llm.trace.most_rows >= 40
        before = llm.load.prefix_hits
        warm = llm.generate(prompts, GREEDY)
        require_parity(reference, warm)
        assert llm.load.prefix_hits - before > 5_000
        assert sum(output.choices[0].finished.usage.cached_tokens for output in warm) > 5_000


def test_with_a_token_budget_of_64(
    smollm2_dir: Path, prompts: list[list[int]], reference: Reference
) -> None:
    chunked = [ids for ids in prompts if len(ids) < 2_000]
    assert len(chunked) > 40
    with LLM(str(smollm2_dir), options=replace(ROOMY, max_num_batched_tokens=64)) as llm:
        require_parity(reference, llm.generate(chunked, GREEDY))
        assert llm.trace.most_tokens == 64
        # The longest prompt alone takes that many chunks.
        assert llm.trace.num_steps > max(map(len, chunked)) / 64 + NUM_NEW


def test_with_a_pool_so_small_that_requests_are_preempted(
    smollm2_dir: Path, short_prompts: list[list[int]], reference: Reference
) -> None:
    with LLM(str(smollm2_dir), options=SMALL) as llm:
        require_parity(reference, llm.generate(short_prompts, GREEDY))
        assert llm.load.preemptions > 0


def test_with_prefix_caching_off(
    smollm2_dir: Path, short_prompts: list[list[int]], reference: Reference
) -> None:
    with LLM(str(smollm2_dir), options=replace(ROOMY, enable_prefix_caching=False)) as llm:
        require_parity(reference, llm.generate(short_prompts, GREEDY))
        again = llm.generate(short_prompts[-8:], GREEDY)
        require_parity(reference, again)
        assert llm.load.prefix_hits == 0
        assert not any(output.choices[0].finished.usage.cached_tokens for output in again)


@pytest.mark.parametrize("depth", [1, 3])
def test_at_other_pipeline_depths(
    smollm2_dir: Path, short_prompts: list[list[int]], reference: Reference, depth: int
) -> None:
    with LLM(str(smollm2_dir), options=replace(SMALL, pipeline_depth=depth)) as llm:
        require_parity(reference, llm.generate(short_prompts[::4], GREEDY))
        assert llm.trace.most_in_flight == depth
