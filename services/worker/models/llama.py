"""Llama (Touvron et al. 2023), up to Llama 3.x and what is built like it (SmolLM2)."""

from __future__ import annotations

from services.worker.models._decoder import DecoderLM as build
from services.worker.models._read_decoder import full_attention, read_decoder_config
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
        mlp_bias=raw.boolean("mlp_bias", False),
        qk_norm=False,
        sliding_windows=full_attention,
    )
