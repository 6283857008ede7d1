"""Qwen3: q and k are normalised per head; biases are the exception."""

from __future__ import annotations

from services.worker.models._decoder import DecoderLM as build
from services.worker.models._read_decoder import read_decoder_config, windows_by_layer_type
from services.worker.models.base import HfConfig, ModelConfig

__all__ = ["build", "read_config"]


def read_config(raw: HfConfig) -> ModelConfig:
    """Read config.json.

    Raises:
        ConfigError: It names a feature that is not supported.
    """
    bias = raw.boolean("attention_bias", False)
    return read_decoder_config(
        raw,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        qk_norm=True,
        sliding_windows=lambda num_layers: windows_by_layer_type(raw, num_layers),
        default_head_size=128,
    )
