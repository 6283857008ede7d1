"""Each family computes what transformers computes, whole, chunked and paged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.native.isa import LEVELS, IsaSetting, best_level, machine_flags
from tests.tiny_models import make_tiny_model
from tests.unit.worker.models.paged_forward import PagedForward, load

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head-per-query-head": ("llama", {"num_key_value_heads": 4}),
    "llama-single-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-llama3-rope": ("llama", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5000.0}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-rope-parameters": (
        "llama",
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 20000.0}},
    ),
    "llama-shards": ("llama", {"num_shards": 3}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-tied-window": ("mistral", {"sliding_window": 20, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-shards": ("qwen2", {"tie_word_embeddings": True, "num_shards": 2}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 5}),
    "qwen2-max-window-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
}

LEVELS_HERE = [isa.name for isa in LEVELS[: best_level(machine_flags()) + 1]]
ISA_SETTINGS = ["off", *LEVELS_HERE]

LENGTHS = (41, 5, 23)
# One step each: whole prompts, then chunks beside decodes, then decodes alone.
WHOLE = [LENGTHS]
CHUNKED = [(13, 3, 0), (1, 0, 1), (20, 1, 17), (1, 1, 1), (6, 0, 4)]


@pytest.fixture(params=CASES, scope="module")
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = CASES[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("model"), family, **overrides)


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]


def reference_logits(model_dir: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].float() for ids in sequences()]


@pytest.mark.parametrize("isa", ISA_SETTINGS)
def test_logits_equal_transformers_whole_chunked_and_decoded(
    model_dir: Path, isa: IsaSetting
) -> None:
    expected = reference_logits(model_dir)
    loaded = load(model_dir, isa=isa)
    for chunks in (WHOLE, CHUNKED):
        actual = PagedForward(loaded, sequences(), block_size=4, seed=len(chunks)).run(chunks)
        for row, wanted in zip(actual, expected, strict=True):
            # Sums are taken in another order: 1e-3 on logits that spread over tens.
            torch.testing.assert_close(row, wanted, atol=1e-3, rtol=1e-4)
            decided = is_decided(wanted)
            assert torch.equal(row.argmax(-1)[decided], wanted.argmax(-1)[decided])


def test_logits_spread_so_that_ties_do_not_decide(model_dir: Path) -> None:
    logits = torch.cat(reference_logits(model_dir))
    assert logits.std() > 2
    # Of so many positions a few are close by chance.
    assert is_decided(logits).float().mean() > 0.95


def is_decided(logits: torch.Tensor) -> torch.Tensor:
    """Positions whose best token is ahead by more than the tolerance of two logits."""
    best, second = logits.topk(2).values.unbind(-1)
    return best - second > 5e-3


@pytest.mark.parametrize("isa", LEVELS_HERE)
def test_float32_logits_are_bitwise_the_same_natively_whatever_the_chunks(
    model_dir: Path, isa: IsaSetting
) -> None:
    """The whole forward pass computes each token by itself."""
    loaded = load(model_dir, isa=isa)
    whole = PagedForward(loaded, sequences(), block_size=4).run(WHOLE)
    chunked = PagedForward(loaded, sequences(), block_size=4, seed=1).run(CHUNKED)
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))


@pytest.mark.parametrize("isa", ISA_SETTINGS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_to_float32_as_transformers_in_bfloat16(
    family: str, isa: IsaSetting, tmp_path: Path
) -> None:
    model_dir = make_tiny_model(tmp_path, family, dtype="bfloat16")
    exact = torch.cat(reference_logits(model_dir))
    theirs = torch.cat(reference_logits(model_dir, torch.bfloat16))
    loaded = load(model_dir, isa=isa)
    ours = torch.cat(PagedForward(loaded, sequences(), block_size=4).run(CHUNKED))
    assert loaded.dtype == torch.bfloat16
    # Root mean square errors of the same kind of rounding in another order: within a quarter.
    assert (ours - exact).square().mean().sqrt() < 1.25 * (theirs - exact).square().mean().sqrt()
