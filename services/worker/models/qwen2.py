"""Qwen2 and Qwen2.5: biases on q, k and v; the window, if any, from some layer on."""

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
    return read_decoder_config(
        raw,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=lambda num_layers: windows_by_layer_type(raw, num_layers),
    )
