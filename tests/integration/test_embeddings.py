"""Pooled vectors are those of transformers in float32, however the engine came by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.sampling import SamplingParams
from services.offline import LLM, Job, LLMOptions
from services.scheduler.core.output import FinishReason
from tests.tiny_models import make_tiny_model

TOLERANCE = 1e-4
MAX_MODEL_LEN = 256
# A budget far below the prompts: most are computed in chunks.
OPTIONS = LLMOptions(
    dtype="float32",
    num_gpu_blocks_override=200,
    max_model_len=MAX_MODEL_LEN,
    max_num_batched_tokens=32,
)
LONG = [*range(10, 210), *range(10, 66)]
PROMPTS = [[7], [11, 12], [*range(20, 51)], [*range(20, 52)], [*range(20, 53)], LONG]


def mean_pooled(model_dir: Path, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The reference: mean of the last hidden state (it is after the norm), of length 1."""
    model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([list(ids)])).last_hidden_state[0] for ids in prompts]
    return [torch.nn.functional.normalize(s.mean(0), dim=0).tolist() for s in states]


def require_equal(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("embeddings") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> list[list[float]]:
    vectors = mean_pooled(tiny_dir, PROMPTS)
    for i, one in enumerate(vectors):  # the comparison can fail: no two are alike
        assert all(one != pytest.approx(other, abs=0.01) for other in vectors[:i])
    return vectors


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> Iterator[LLM]:
    with LLM(str(tiny_dir), options=OPTIONS) as llm:
        yield llm


def test_vectors_are_those_of_transformers_up_to_a_prompt_that_fills_the_context(
    llm: LLM, expected: list[list[float]]
) -> None:
    assert len(LONG) == MAX_MODEL_LEN
    require_equal(llm.embed(PROMPTS), expected)
    assert llm.trace.most_tokens <= 32 < len(LONG)


def test_a_hot_prefix_cache_is_filled_but_not_read(llm: LLM, expected: list[list[float]]) -> None:
    assert llm.reset_prefix_cache()
    llm.generate([LONG[:-8]], SamplingParams(max_tokens=1))
    before = llm.load
    require_equal(llm.embed(PROMPTS), expected)
    assert llm.load.prefix_hits == before.prefix_hits
    assert llm.reset_prefix_cache()
    llm.embed([LONG])
    hits = llm.load.prefix_hits
    llm.generate([LONG[:-8]], SamplingParams(max_tokens=1))
    assert llm.load.prefix_hits - hits == 240  # all full blocks but the last token's


def test_vectors_and_outputs_made_in_the_same_steps_are_those_made_alone(
    llm: LLM, expected: list[list[float]]
) -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True)
    alone = llm.generate(PROMPTS[:5], params)
    jobs = [
        job
        for ids in PROMPTS[:5]
        for job in (Job(prompt=ids, params=params), Job(prompt=ids, pools=True))
    ]
    outputs = llm.run([*jobs, Job(prompt=LONG, pools=True)])
    for i, output in enumerate(alone):
        assert outputs[2 * i].choices[0].token_ids == output.choices[0].token_ids
    ends = [output.choices[0].finished for output in (*outputs[1:10:2], outputs[10])]
    vectors = [torch.frombuffer(bytearray(end.pooled), dtype=torch.float32) for end in ends]
    require_equal([vector.tolist() for vector in vectors], expected)
    for end, ids in zip(ends, PROMPTS, strict=True):
        assert end.reason is FinishReason.STOP
        assert (end.usage.prompt_tokens, end.usage.output_tokens) == (len(ids), 0)
        assert (end.usage.cached_tokens, end.usage.wasted_tokens) == (0, 0)


def test_vectors_survive_preemption(tiny_dir: Path) -> None:
    prompts = [[10 + i, *range(20, 60)] for i in range(6)]
    # Room for three prompts; those that generate grow and push the others out half way.
    options = LLMOptions(
        dtype="float32", num_gpu_blocks_override=12, max_model_len=128, max_num_batched_tokens=8
    )
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(str(tiny_dir), options=options) as llm:
        jobs = [Job(prompt=[5, 6, 7 + i], params=params) for i in range(3)]
        jobs += [Job(prompt=ids, pools=True) for ids in prompts]
        outputs = llm.run(jobs)[3:]
    ends = [output.choices[0].finished for output in outputs]
    assert sum(end.life.num_preemptions for end in ends) > 0
    vectors = [torch.frombuffer(bytearray(end.pooled), dtype=torch.float32) for end in ends]
    require_equal([vector.tolist() for vector in vectors], mean_pooled(tiny_dir, prompts))


def test_what_cannot_be_pooled_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.embed([[*LONG, 7]])
    with pytest.raises(InvalidRequest, match="empty"):
        llm.embed([[]])
    with pytest.raises(InvalidRequest, match="pools has n 1"):
        llm.run([Job(prompt=[7], pools=True, n=2)])
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        llm.run([Job(prompt=[7], pools=True, params=SamplingParams(prompt_logprobs=1))])


@pytest.mark.slow
def test_vectors_of_the_packaged_model_are_those_of_transformers(smollm2_dir: Path) -> None:
    texts = ["The capital of France is Paris.", "x", "日本の首都は", "long words " * 300]
    options = LLMOptions(dtype="float32", num_gpu_blocks_override=128, max_num_batched_tokens=256)
    with LLM(str(smollm2_dir), options=options) as llm:
        vectors = llm.embed(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    require_equal(vectors, mean_pooled(smollm2_dir, [tokenizer(text).input_ids for text in texts]))
