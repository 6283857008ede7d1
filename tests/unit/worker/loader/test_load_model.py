"""Loading: what fits is loaded exactly, what does not is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from services.common.errors import ConfigError
from services.worker.loader.load_model import LoadedModel, load_model
from tests.tiny_models import EOS_TOKEN_ID, make_tiny_model, write_weights

CPU = torch.device("cpu")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def load(model_dir: Path, *, dtype: str = "auto", backend: str = "torch_sdpa") -> LoadedModel:
    return load_model(
        model_dir,
        dtype=dtype,
        device=CPU,
        attention_backend=backend,
        block_size=16,
        report=lambda done, total: None,
    )


def edit_config(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(model_dir: Path, **changes: np.ndarray | None) -> None:
    tensors = {name: tensor.numpy() for name, tensor in stored(model_dir).items()}
    for name, array in changes.items():
        if array is None:
            del tensors[name]
        else:
            tensors[name] = array
    write_weights(model_dir, tensors)


def stored(model_dir: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(model_dir.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


class Unfinished:
    """A family's model before ``finish_loading``, for a look at its slots."""

    def __init__(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from services.worker.models._decoder import DecoderLM

        monkeypatch.setattr(DecoderLM, "finish_loading", lambda self, library: None)
        self.slots = load(model_dir).model.weight_slots()


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_arrives_where_its_name_says(
    family: str, num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path, family, num_shards=num_shards)
    slots = Unfinished(tmp_path, monkeypatch).slots
    expected = stored(tmp_path)
    assert slots.keys() == expected.keys()
    for name, slot in slots.items():
        assert torch.equal(slot, expected[name]), name


def test_weights_are_converted_to_the_dtype_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path)
    edit_config(tmp_path, dtype="bfloat16")
    slots = Unfinished(tmp_path, monkeypatch).slots
    for name, tensor in stored(tmp_path).items():
        assert torch.equal(slots[name], tensor.bfloat16()), name


@pytest.mark.parametrize(
    ("checkpoint", "wanted", "expected"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("float16", "bfloat16", torch.bfloat16),
    ],
)
def test_dtype_is_resolved(
    checkpoint: str, wanted: str, expected: torch.dtype, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path, dtype=checkpoint)
    assert load(tmp_path, dtype=wanted).dtype == expected


def test_a_float16_checkpoint_runs_in_float32_on_a_cpu_and_says_so(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, dtype="float16")
    with capture_logs() as logs:
        assert load(tmp_path).dtype == torch.float32
    assert [line for line in logs if line["event"] == "float16_runs_as_float32"]


@pytest.mark.parametrize("key", ["torch_dtype", None])
def test_the_dtype_is_found_in_its_old_key_and_in_the_tensors(
    key: str | None, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path, dtype="bfloat16")
    edit_config(tmp_path, dtype=None, **({key: "torch.bfloat16"} if key else {}))
    assert load(tmp_path).dtype == torch.bfloat16


def test_an_unsupported_dtype_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"'int8'.*float32, bfloat16"):
        load(tmp_path, dtype="int8")


def test_progress_is_in_bytes_and_ends_complete(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_shards=2)
    seen: list[tuple[int, int]] = []
    load_model(
        tmp_path,
        dtype="auto",
        device=CPU,
        attention_backend="torch_sdpa",
        block_size=16,
        report=lambda done, total: seen.append((done, total)),
    )
    total = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert {each for _, each in seen} == {total}
    done = [each for each, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0 and done[-1] == total and len(done) > 10


def test_end_of_sequence_ids_come_from_both_configs(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    assert load(tmp_path).eos_token_ids == (EOS_TOKEN_ID,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert load(tmp_path).eos_token_ids == (EOS_TOKEN_ID, 5, 7)


def test_loading_holds_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, hidden_size=512, intermediate_size=2048, vocab_size=2000)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size > 40 << 20
    load(tmp_path)  # what the first load alone allocates (libraries, pools) is not of interest
    start = anonymous_bytes()
    peak = start

    def report(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    load_model(
        tmp_path,
        dtype="float32",
        device=CPU,
        attention_backend="torch_sdpa",
        block_size=16,
        report=report,
    )
    # The parameters themselves, and a tenth for what the allocator rounds up.
    assert peak - start < 1.1 * size


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    edit_tensors(tmp_path, **{"model.layers.1.self_attn.k_proj.weight": None})
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight$"):
        load(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen2")
    edit_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.3\..* and 7 more$"):
        load(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    bias = np.zeros(64, dtype=np.float32)
    edit_tensors(tmp_path, **{"model.layers.0.self_attn.o_proj.bias": bias})
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.0\.self_attn\.o_proj\.bias"):
        load(tmp_path)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    edit_tensors(tmp_path, **{"model.norm.weight": np.ones(63, dtype=np.float32)})
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' has shape \[63\].*\[64\]"):
        load(tmp_path)


def test_a_tied_model_ignores_a_stored_copy_of_its_head(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, **{"lm_head.weight": np.zeros((320, 64), dtype=np.float32)})
    load(tmp_path)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(tmp_path, **{name: np.ones(8, dtype=np.float32)})
    load(tmp_path)


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors in .*other weight formats"):
        load(tmp_path)


def test_a_shard_that_the_index_names_must_exist(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names model-00002-of-00002\.safetensors"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_shards=2)
    first = load_file(tmp_path / "model-00001-of-00002.safetensors")
    path = tmp_path / "model-00002-of-00002.safetensors"
    twice = {**load_file(path), "model.embed_tokens.weight": first["model.embed_tokens.weight"]}
    # Copies: what was loaded is a map of the very file that is written.
    save_file({name: tensor.clone() for name, tensor in twice.items()}, path)
    with pytest.raises(ConfigError, match=r"'model\.embed_tokens\.weight' is in both"):
        load(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load(tmp_path)


def test_an_unknown_family_lists_the_supported_ones(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    edit_config(tmp_path, model_type="mamba")
    with pytest.raises(ConfigError, match=r"'mamba'.*llama, mistral, qwen2, qwen3"):
        load(tmp_path)


def test_an_unknown_attention_backend_lists_the_available_ones(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"'warp'.*torch_sdpa"):
        load(tmp_path, backend="warp")
