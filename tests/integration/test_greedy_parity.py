"""Greedy output equals transformers in float32, token by token, in every mode of the engine.

Each mode asserts that what it is about has happened. The engine runs in this process here; alone
and all at once over HTTP through the five processes is tested in tests/e2e.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.common.sampling import SamplingParams
from services.offline import LLM, LLMOptions, Output
from services.tokenizer.chat_template import Chat, ChatTemplates
from services.tokenizer.encode import Encoder
from tests.integration.prompts import CHAT, LONG, RAW, long_prompt
from tests.integration.reference import Reference

pytestmark = pytest.mark.slow

NUM_NEW = 32
MAX_NEAR_TIES = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
MAX_LEN = 3_600


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Reference:
    return Reference(smollm2_dir)


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    encoder = Encoder(smollm2_dir, num_threads=1)
    template = ChatTemplates.load(smollm2_dir).choose(with_tools=False)

    def encode(text: str) -> list[int]:
        return encoder.encode_now(text, add_special_tokens=False, param="prompt")

    chats = [template.render(Chat([{"role": "user", "content": text}])) for text in CHAT]
    found = [encode(text) for text in [*RAW, *chats]]
    found += [long_prompt(size, seed, encode) for size, seed in LONG]
    encoder.close()
    assert len(found) >= 40
    assert {len(ids) for ids in found} >= {1, 3500}
    return found


def _options(**changes: object) -> LLMOptions:
    values: dict[str, object] = {
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "max_num_seqs": 48,
        "num_gpu_blocks_override": 900,
    }
    return LLMOptions(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def roomy(smollm2_dir: Path) -> Iterator[LLM]:
    """A pool that holds all prompts at once."""
    with LLM(str(smollm2_dir), options=_options()) as llm:
        yield llm


def _require_parity(reference: Reference, outputs: Sequence[Output]) -> None:
    num_near_ties = 0
    for output in outputs:
        ids = output.choices[0].token_ids
        assert len(ids) == NUM_NEW
        verdict = reference.judge(output.prompt_ids, ids)
        assert verdict.is_equal, f"prompt {output.prompt_ids[:8]}...: {verdict.detail}"
        num_near_ties += verdict.near_tie_at is not None
    assert num_near_ties <= MAX_NEAR_TIES


def test_each_alone(roomy: LLM, prompts: list[list[int]], reference: Reference) -> None:
    roomy.reset_prefix_cache()
    outputs = [roomy.generate([ids], GREEDY)[0] for ids in prompts[::6]]
    _require_parity(reference, outputs)


def test_all_at_once_and_then_with_a_warm_prefix_cache(
    roomy: LLM, prompts: list[list[int]], reference: Reference
) -> None:
    roomy.reset_prefix_cache()
    _require_parity(reference, roomy.generate(prompts, GREEDY))
    assert roomy.trace.most_rows >= 40
    before = roomy.load.prefix_hits
    warm = roomy.generate(prompts, GREEDY)
    _require_parity(reference, warm)
    assert roomy.load.prefix_hits - before >= 3_500
    assert sum(output.choices[0].finished.usage.cached_tokens for output in warm) >= 3_500


def test_with_a_token_budget_of_64(
    smollm2_dir: Path, prompts: list[list[int]], reference: Reference
) -> None:
    options = _options(max_num_batched_tokens=64)
    with LLM(str(smollm2_dir), options=options) as llm:
        _require_parity(reference, llm.generate(prompts, GREEDY))
        assert llm.trace.most_tokens <= 64
        assert llm.trace.num_steps > sum(len(ids) for ids in prompts) / 64  # many chunks


def test_with_a_pool_so_small_that_requests_are_preempted(
    smollm2_dir: Path, prompts: list[list[int]], reference: Reference
) -> None:
    options = _options(num_gpu_blocks_override=1 + MAX_LEN // 16 + 2)
    with LLM(str(smollm2_dir), options=options) as llm:
        _require_parity(reference, llm.generate(prompts, GREEDY))
        assert llm.load.preemptions > 0


def test_with_prefix_caching_off(
    smollm2_dir: Path, prompts: list[list[int]], reference: Reference
) -> None:
    short = [ids for ids in prompts if len(ids) < 1_000]
    with LLM(str(smollm2_dir), options=_options(enable_prefix_caching=False)) as llm:
        for _ in range(2):
            _require_parity(reference, llm.generate(short, GREEDY))
        assert llm.load.prefix_hits == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_at_other_pipeline_depths(
    smollm2_dir: Path, prompts: list[list[int]], reference: Reference, depth: int
) -> None:
    short = [ids for ids in prompts if len(ids) < 200]
    with LLM(str(smollm2_dir), options=_options(pipeline_depth=depth)) as llm:
        _require_parity(reference, llm.generate(short, GREEDY))
