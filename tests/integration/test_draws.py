"""A request draws the same tokens (float32) whatever the engine does around it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.sampling import SamplingParams
from services.offline import LLM, LLMOptions, Output
from services.worker.native.library import usable_cores
from tests.tiny_models import make_tiny_model

PROMPTS = [[*range(20, 20 + length), 200 + length] for length in (1, 4, 15, 16, 33, 60)]
DRAWN = SamplingParams(temperature=2.0, top_p=0.98, seed=11, max_tokens=24, ignore_eos=True)
NUM_CHOICES = 2
ROOMY = LLMOptions(
    dtype="float32",
    block_size=8,
    num_gpu_blocks_override=900,
    max_model_len=128,
    max_num_seqs=96,
    pipeline_depth=2,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draws") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def roomy(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), options=ROOMY) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[list[list[int]]]:
    """What each prompt's choices are when nothing else runs: one row, one step at a time."""
    options = replace(ROOMY, max_num_seqs=1, pipeline_depth=1, enable_prefix_caching=False)
    with LLM(str(model_dir), options=options) as llm:
        outputs = drawn(llm.generate(PROMPTS, DRAWN, n=NUM_CHOICES))
        assert llm.trace.most_rows == 1
    assert all(len({tuple(ids) for ids in choices}) == NUM_CHOICES for choices in outputs)
    return outputs


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Other processes want every core, in bursts: threads lose theirs in the middle of a tile."""
    burst = (
        "import time\n"
        "while True:\n"
        "    until = time.perf_counter() + 0.002\n"
        "    while time.perf_counter() < until: pass\n"
        "    time.sleep(0.0005)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", burst]) for _ in range(usable_cores() + 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def drawn(outputs: list[Output]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.choices] for output in outputs]


def test_draws_are_equal_alone_and_among_64_others(
    roomy: LLM, alone: list[list[list[int]]]
) -> None:
    others = [[*range(30, 50), first] for first in range(100, 164)]
    each = [DRAWN] * len(PROMPTS) + [replace(DRAWN, seed=seed) for seed in range(64)]
    outputs = roomy.generate([*PROMPTS, *others], each, n=NUM_CHOICES)
    assert roomy.trace.most_rows > 64
    assert drawn(outputs[: len(PROMPTS)]) == alone


@pytest.mark.parametrize("budget", [7, 16])
def test_draws_are_equal_with_any_chunking_of_the_prompt(
    model_dir: Path, alone: list[list[list[int]]], budget: int
) -> None:
    with LLM(str(model_dir), options=replace(ROOMY, max_num_batched_tokens=budget)) as llm:
        assert drawn(llm.generate(PROMPTS, DRAWN, n=NUM_CHOICES)) == alone
        assert llm.trace.most_tokens == budget


def test_draws_are_equal_after_preemption(model_dir: Path, alone: list[list[list[int]]]) -> None:
    with LLM(str(model_dir), options=replace(ROOMY, num_gpu_blocks_override=24)) as llm:
        assert drawn(llm.generate(PROMPTS, DRAWN, n=NUM_CHOICES)) == alone
        assert llm.load.preemptions > 0


@pytest.mark.parametrize("depth", [1, 3])
def test_draws_are_equal_at_any_pipeline_depth(
    model_dir: Path, alone: list[list[list[int]]], depth: int
) -> None:
    with LLM(str(model_dir), options=replace(ROOMY, pipeline_depth=depth)) as llm:
        assert drawn(llm.generate(PROMPTS, DRAWN, n=NUM_CHOICES)) == alone
        assert llm.trace.most_in_flight == depth


def test_draws_are_equal_with_a_cold_and_a_hot_prefix_cache(
    roomy: LLM, alone: list[list[list[int]]]
) -> None:
    assert roomy.reset_prefix_cache()
    assert drawn(roomy.generate(PROMPTS, DRAWN, n=NUM_CHOICES)) == alone
    hits = roomy.load.prefix_hits
    hot = roomy.generate(PROMPTS, DRAWN, n=NUM_CHOICES)
    assert drawn(hot) == alone
    assert roomy.load.prefix_hits > hits
    assert hot[-1].choices[0].finished.usage.cached_tokens == 56


def test_draws_are_equal_while_other_processes_take_the_cores(
    roomy: LLM, alone: list[list[list[int]]]
) -> None:
    with busy_cores():
        for _ in range(10):
            roomy.reset_prefix_cache()
            assert drawn(roomy.generate(PROMPTS, DRAWN, n=NUM_CHOICES)) == alone
