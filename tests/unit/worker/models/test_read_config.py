"""What config.json says is read, refused by name, or named as ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.common.errors import ConfigError
from services.common.plugins import load_plugin
from services.worker.models.base import HfConfig, ModelConfig
from tests.tiny_models import make_tiny_model
from tests.unit.worker.models.paged_forward import load

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def read(family: str, **values: Any) -> ModelConfig:
    merged = {**BASE, "model_type": family, **values}
    raw = HfConfig(
        {key: value for key, value in merged.items() if value != "absent"}, where="config.json"
    )
    config: ModelConfig = load_plugin("services.worker.models", family, what="model").read_config(
        raw
    )
    return config


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "mscale": 1.0}}, "'mscale'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "'full_attention'"),
        ({"hidden_size": "absent"}, "hidden_size = None"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        read("llama", **values)


def test_a_mistral_of_unlike_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        read("mistral", layer_types=["sliding_attention", "full_attention"] * 2)


@pytest.mark.parametrize(
    ("layer_types", "named"),
    [
        (["full_attention"], "layer_types"),
        (["full_attention"] * 3 + ["chunked_attention"], "'chunked_attention'"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(layer_types: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read("qwen2", layer_types=layer_types)


@pytest.mark.parametrize(
    ("family", "values", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None,) * 4),
        ("mistral", {"sliding_window": 8}, (8,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {}, (4096,) * 4),
        (
            "qwen2",
            {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
            (None,) * 4,
        ),
        ("qwen2", {"sliding_window": 8}, (None,) * 4),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_windows_are_per_layer(
    family: str, values: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(family, **values).sliding_windows == windows


def test_defaults_are_those_of_each_family() -> None:
    assert read("llama").head_size == 8
    assert read("qwen3").head_size == 128
    assert read("llama", num_key_value_heads="absent").num_kv_heads == 4
    assert (read("qwen2").qkv_bias, read("qwen2").o_bias) == (True, False)
    assert read("llama", attention_bias=True).o_bias
    assert read("qwen3").qk_norm and not read("llama").qk_norm


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ],
)
def test_rope_is_read_in_old_and_new_spelling(values: dict[str, Any]) -> None:
    rope = read("llama", **values).rope
    assert (rope.rope_type, rope.theta, rope.factor, rope.rotary_dim) == ("linear", 500.0, 2.0, 8)


def test_a_partial_rotary_factor_shortens_what_is_rotated() -> None:
    assert read("llama", partial_rotary_factor=0.5).rope.rotary_dim == 4
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert read("llama", rope_parameters=parameters).rope.rotary_dim == 2


def test_keys_that_nobody_reads_are_named_in_the_log(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, use_parallel_residual=True, use_cache=True)
    with capture_logs() as logs:
        load(tmp_path)
    (line,) = [line for line in logs if line["event"] == "config_keys_ignored"]
    assert line["keys"] == ["use_parallel_residual"]


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_config_that_is_no_object_is_refused_with_its_path(
    content: str | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        HfConfig.load(tmp_path / "config.json")


def test_a_config_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": 1, "b": 2}))
    raw = HfConfig.load(tmp_path / "config.json")
    assert raw.integer("a") == 1
    assert raw.unread == ["b"]
