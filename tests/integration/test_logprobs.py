"""Log-probabilities of outputs and prompts are those of transformers, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from services.common.sampling import SamplingParams
from services.offline import LLM, LLMOptions, Output
from services.tokenizer.tokens import Logprobs, PromptLogprobs
from tests.tiny_models import make_tiny_model

NUM_TOP = 5
TOLERANCE = 1e-3
OPTIONS = LLMOptions(
    dtype="float32", num_gpu_blocks_override=200, max_model_len=256, max_num_batched_tokens=32
)
# Everything that changes what is drawn: none of it may change what is told.
PARAMS = SamplingParams(
    temperature=1.4,
    top_p=0.9,
    repetition_penalty=1.3,
    logit_bias={40: 5.0},
    seed=3,
    max_tokens=12,
    ignore_eos=True,
    logprobs=NUM_TOP,
    prompt_logprobs=NUM_TOP,
)
PROMPTS = [[*range(20, 65)], [*range(20, 65), 7], [11, 12], [*range(100, 140)]]


@torch.inference_mode()
def reference(model_dir: Path, outputs: Sequence[Output]) -> list[torch.Tensor]:
    """Per output ``[num_tokens - 1, vocab_size]``: log-probabilities of what follows each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    found = []
    for output in outputs:
        ids = torch.tensor([[*output.prompt_ids, *output.choices[0].token_ids]])
        found.append(model(ids, use_cache=False).logits[0, :-1].log_softmax(-1))
    return found


def require_rows(
    rows: Logprobs | PromptLogprobs, token_ids: Sequence[int], expected: torch.Tensor
) -> None:
    """One row per token: its value, its rank, and the best alternatives in order."""
    assert len(rows.logprobs) == len(token_ids) == len(expected)
    assert rows.num_top == [NUM_TOP] * len(token_ids)
    for i, (token_id, line) in enumerate(zip(token_ids, expected, strict=True)):
        assert rows.logprobs[i] == pytest.approx(line[token_id].item(), abs=TOLERANCE)
        better = int((line > line[token_id] + TOLERANCE).sum())
        no_worse = int((line >= line[token_id] - TOLERANCE).sum())
        assert better < rows.ranks[i] <= no_worse
        tops = slice(i * NUM_TOP, (i + 1) * NUM_TOP)
        best = line.topk(NUM_TOP).values.tolist()
        assert rows.top_logprobs[tops] == pytest.approx(best, abs=TOLERANCE)
        named = line[rows.top_ids[tops]].tolist()
        assert rows.top_logprobs[tops] == pytest.approx(named, abs=TOLERANCE)


def require_parity(model_dir: Path) -> None:
    with LLM(str(model_dir), options=OPTIONS) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=1))  # the cache is hot: it must not be read
        outputs = llm.generate(PROMPTS, PARAMS)
    for output, expected in zip(outputs, reference(model_dir, outputs), strict=True):
        (choice,) = output.choices
        split = len(output.prompt_ids) - 1
        assert output.prompt_logprobs is not None and choice.logprobs is not None
        require_rows(output.prompt_logprobs, output.prompt_ids[1:], expected[:split])
        require_rows(choice.logprobs, choice.token_ids, expected[split:])


def test_logprobs_of_a_tiny_model_are_those_of_transformers(tmp_path: Path) -> None:
    require_parity(make_tiny_model(tmp_path / "tiny", tokenizer=True))


@pytest.mark.slow
def test_logprobs_of_the_packaged_model_are_those_of_transformers(smollm2_dir: Path) -> None:
    require_parity(smollm2_dir)
