"""Mistral (Jiang et al. 2023): Llama with one sliding window for all layers."""

from __future__ import annotations

from services.worker.models._decoder import DecoderLM as build
from services.worker.models._read_decoder import read_decoder_config, sliding_window
from services.worker.models.base import HfConfig, ModelConfig

__all__ = ["build", "read_config"]


def read_config(raw: HfConfig) -> ModelConfig:
    """Read config.json.

    Raises:
        ConfigError: It names a feature that is not supported.
    """
    if raw.get("layer_types") is not None:
        raise raw.wrong("layer_types", "absent: all layers of a mistral share one window")
    window = sliding_window(raw)
    return read_decoder_config(
        raw,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=lambda num_layers: [window] * num_layers,
    )
