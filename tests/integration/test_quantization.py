"""A model with weights in few bits: loaded while it is read, the same by every path, served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.errors import ConfigError
from services.common.plugins import plugin_names
from services.common.sampling import SamplingParams
from services.offline import LLM, LLMOptions
from services.worker.identity import identify
from services.worker.loader.load_model import load_model
from services.worker.native.library import load_library
from tests.tiny_models import make_tiny_model
from tests.unit.worker.models.paged_forward import CPU, PagedForward

METHODS = plugin_names("services.worker.quantization")
OPTIONS = LLMOptions(num_gpu_blocks_override=64, max_model_len=128, dtype="float32")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[*range(10, 30)], [7, 8, 9], [*range(40, 90)]]


def logits_of(model_dir: Path, *, quantization: str | None, is_native: bool) -> torch.Tensor:
    loaded = load_model(
        model_dir,
        dtype="float32",
        device=CPU,
        attention_backend="auto",
        block_size=4,
        report=lambda done, total: None,
        library=load_library() if is_native else None,
        quantization=quantization,
    )
    (logits,) = PagedForward(loaded, [range(10, 60)], block_size=4).run([[50]])
    return logits


@pytest.mark.parametrize("quantization", METHODS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_native_kernels_agree_with_torch_and_both_are_near_the_model(
    tmp_path: Path, is_tied: bool, quantization: str
) -> None:
    model_dir = make_tiny_model(
        tmp_path, "qwen2", tokenizer=True, tie_word_embeddings=is_tied, num_shards=2
    )
    plain = logits_of(model_dir, quantization=None, is_native=False)
    reference = logits_of(model_dir, quantization=quantization, is_native=False)
    native = logits_of(model_dir, quantization=quantization, is_native=True)
    torch.testing.assert_close(native, reference, atol=2e-2, rtol=1e-4)
    loss = (reference - plain).norm() / plain.norm()
    # Random weights use their bits worst: 8 bits are off by about 1 %, 4 bits by about 15 %.
    assert 0 < loss < {"int8": 0.03, "int4": 0.4}[quantization]


@pytest.mark.parametrize("quantization", METHODS)
def test_a_quantized_model_generates_alone_as_beside_others(
    tmp_path: Path, quantization: str
) -> None:
    model_dir = str(make_tiny_model(tmp_path, tokenizer=True))
    with LLM(model_dir, options=replace(OPTIONS, quantization=quantization)) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].choices[0].token_ids for prompt in PROMPTS]
        beside = [output.choices[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert alone == beside
    with LLM(
        model_dir, options=replace(OPTIONS, quantization=quantization, cpu_isa="off")
    ) as reference:
        outputs = reference.generate(PROMPTS, GREEDY)
    assert [output.choices[0].token_ids for output in outputs] == beside


def test_an_unknown_method_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    model_dir = str(make_tiny_model(tmp_path, tokenizer=True))
    with pytest.raises(ConfigError, match=r"unknown quantization 'int3'; available: int4, int8"):
        LLM(model_dir, options=replace(OPTIONS, quantization="int3"))


def test_kv_blocks_of_other_quantizations_are_of_another_kind(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, tokenizer=True)
    prints = {
        identify(
            model_dir,
            worker_id=None,
            model="m",
            dtype="torch.float32",
            quantization=quantization,
            layout="NHD",
        ).kv_fp
        for quantization in (None, *METHODS)
    }
    assert len(prints) == 1 + len(METHODS)
