"""The packaged model answers what its makers' own code answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.worker.loader.load_model import LoadedModel
from services.worker.native.isa import IsaSetting
from tests.unit.worker.models.paged_forward import PagedForward, load

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France? Answer in one word.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["off", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_knows_the_capital_of_france(
    dtype: str, isa: IsaSetting, smollm2_dir: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    assert len(ids) == 42
    loaded = load(smollm2_dir, dtype=dtype, block_size=16, isa=isa)
    answer = greedy(loaded, ids)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def greedy(loaded: LoadedModel, prompt_ids: list[int], *, max_tokens: int = 16) -> list[int]:
    """Greedy continuation until an end-of-sequence id."""
    ids = prompt_ids + [0] * max_tokens
    forward = PagedForward(loaded, [ids], block_size=16)
    num_new = len(prompt_ids)
    for position in range(len(prompt_ids), len(ids)):
        (logits,) = forward.step([num_new])
        token = int(logits[-1].argmax())
        if token in loaded.eos_token_ids:
            return ids[len(prompt_ids) : position]
        forward.put(0, position, token)
        ids[position] = token
        num_new = 1
    return ids[len(prompt_ids) :]
