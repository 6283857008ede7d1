"""Reads what configs of the Llama kind have in common, and refuses by name what is not built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.common.errors import ConfigError
from services.worker.models._hf_config import HfConfig
from services.worker.models._read_rope import read_rope
from services.worker.models.base import ModelConfig

_REFUSED_WHEN_SET = (
    "quantization_config",
    "compression_config",
    "num_experts",
    "num_local_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "no_rope_layers",
    "attention_chunk_size",
)


def read_decoder_config(
    raw: HfConfig,
    *,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
    sliding_windows: Callable[[int], Sequence[int | None]],
    default_head_size: int | None = None,
) -> ModelConfig:
    """Read a decoder's numbers.

    Args:
        raw: config.json.
        qkv_bias: See ``ModelConfig``; so for the next three.
        o_bias: Bias of attention's output.
        mlp_bias: Bias of the MLP.
        qk_norm: Norm of q and k.
        sliding_windows: Number of layers → each layer's window.
        default_head_size: Where config.json has no ``head_dim``; ``None`` = hidden size over heads.

    Raises:
        ConfigError: A value is missing or wrong, or names a feature that is not supported.
    """
    refuse_unsupported(raw)
    hidden_size = raw.integer("hidden_size")
    num_layers = raw.integer("num_hidden_layers")
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise raw.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    head_size = raw.integer("head_dim", default_head_size or hidden_size // num_heads)
    max_position_embeddings = raw.integer("max_position_embeddings")
    return ModelConfig(
        model_type=raw.text("model_type"),
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=read_rope(raw, head_size=head_size, max_positions=max_position_embeddings),
        tie_word_embeddings=raw.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=tuple(sliding_windows(num_layers)),
    )


def refuse_unsupported(raw: HfConfig) -> None:
    """Refuse features that would change the output if they were ignored.

    Raises:
        ConfigError: Names the first one found.
    """
    for architecture in raw.texts("architectures") or []:
        if not architecture.endswith("ForCausalLM"):
            raise ConfigError(
                f"architecture {architecture!r} is not supported: only ...ForCausalLM is"
            )
    for key in _REFUSED_WHEN_SET:
        if raw.get(key):
            raise ConfigError(f"config.json: {key} = {raw.get(key)!r} is not supported")
    if raw.text("hidden_act", "silu") not in ("silu", "swish"):
        raise raw.wrong("hidden_act", "'silu': no other activation is supported")


def full_attention(num_layers: int) -> list[int | None]:
    """Every layer sees everything."""
    return [None] * num_layers


def sliding_window(raw: HfConfig) -> int | None:
    """Tokens of the window: null means none, an absent key the families' default."""
    return raw.optional_integer("sliding_window") if raw.has("sliding_window") else 4096


def windows_by_layer_type(raw: HfConfig, num_layers: int) -> list[int | None]:
    """The windows of families with ``layer_types``, or the older ``max_window_layers``.

    Raises:
        ConfigError: ``layer_types`` has another length than the model, or an unknown type.
    """
    is_windowed = raw.boolean("use_sliding_window", False)
    window = sliding_window(raw) if is_windowed else None
    num_full = raw.integer("max_window_layers", 28)
    layer_types = raw.texts("layer_types")
    if layer_types is None:
        return [window if layer >= num_full else None for layer in range(num_layers)]
    if len(layer_types) != num_layers:
        raise raw.wrong("layer_types", f"of {num_layers} items, one per layer")
    windows = {"full_attention": None, "sliding_attention": window}
    for layer_type in layer_types:
        if layer_type not in windows:
            raise ConfigError(
                f"config.json: layer_types has {layer_type!r}; supported: {', '.join(windows)}"
            )
    return [windows[layer_type] for layer_type in layer_types]
