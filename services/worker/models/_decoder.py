"""The decoder-only model that all families of the Llama kind are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from services.worker.attention.base import AttentionStep
from services.worker.attention.native_cpu import NativeCpuStep
from services.worker.layers.embedding import Embedding, TiedHead
from services.worker.layers.linear import Linear
from services.worker.layers.linear_kernel import has_native_linear
from services.worker.layers.rms_norm import RmsNorm
from services.worker.layers.rotary import (
    RotaryEmbedding,
    default_frequencies,
    llama3_frequencies,
)
from services.worker.models._blocks import DecoderLayer
from services.worker.models._native_decoder import NativeDecoder
from services.worker.models.base import ModelConfig, RopeConfig
from services.worker.native.library import Library
from services.worker.quantization.base import QuantizationMethod, QuantizedSlot


class DecoderLM:
    """Embedding, layers, norm, head. See ``CausalLM`` for what each method promises."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        size = config.hidden_size
        self._config = config
        self._native: NativeDecoder | None = None
        self._embedding = Embedding(config.vocab_size, size, dtype=dtype, device=device)
        self._layers = [
            DecoderLayer(config, layer, dtype=dtype, device=device)
            for layer in range(config.num_layers)
        ]
        self._norm = RmsNorm(size, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self._head: Linear | TiedHead = (
            TiedHead(self._embedding)
            if config.tie_word_embeddings
            else Linear(
                size, {"lm_head": config.vocab_size}, bias=False, dtype=dtype, device=device
            )
        )
        frequencies = rope_frequencies(config.rope, device=device)
        self._rotary = RotaryEmbedding(frequencies, dtype=dtype)

    def quantize(self, method: QuantizationMethod) -> None:
        """Keep all linear weights, and a tied embedding, as ``method`` makes them."""
        for layer in self._layers:
            layer.quantize(method.quantize)
        self._head.quantize(method.quantize_table)

    def weight_slots(self) -> Mapping[str, torch.Tensor | QuantizedSlot]:
        """Where each checkpoint tensor goes."""
        slots = dict(self._embedding.weight_slots("model.embed_tokens"))
        for index, layer in enumerate(self._layers):
            slots.update(layer.weight_slots(f"model.layers.{index}."))
        slots.update(self._norm.weight_slots("model.norm"))
        slots.update(self._head.weight_slots(""))
        return slots

    def finish_loading(self, library: Library | None) -> None:
        """Let every linear layer choose its kernel; if all are native, so is the forward pass."""
        for layer in self._layers:
            layer.finish_loading(library)
        self._head.finish_loading(library)
        norm = self._norm.weight
        if library is not None and has_native_linear(norm.dtype, norm.device):
            self._native = NativeDecoder(
                self._config,
                [layer.native() for layer in self._layers],
                frequencies=self._rotary.inverse_frequencies,
                embedding=self._embedding.source,
                norm=norm,
                library=library,
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        kv_caches: Sequence[torch.Tensor],
        attention: AttentionStep,
    ) -> torch.Tensor:
        """Run all layers over the step's tokens."""
        if self._native is not None and isinstance(attention, NativeCpuStep):
            return self._native.forward(
                input_ids, positions, kv_caches=kv_caches, batch=attention.arguments
            )
        rotation = self._rotary.at(positions)
        residual = self._embedding(input_ids)
        added: torch.Tensor | None = None
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            added = layer(
                added, residual, rotation=rotation, kv_cache=kv_cache, attention=attention
            )
        assert added is not None, "a model has at least one layer"
        return self._norm.add_and_norm(added, residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project the wanted rows to the vocabulary."""
        return self._head(hidden)


def rope_frequencies(rope: RopeConfig, *, device: torch.device) -> torch.Tensor:
    """Radians per position of each rotated pair, ``[rotary_dim / 2]`` float32."""
    frequencies = default_frequencies(rope.theta, rope.rotary_dim, device=device)
    match rope.rope_type:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return llama3_frequencies(
                frequencies,
                factor=rope.factor,
                low_freq_factor=rope.low_freq_factor,
                high_freq_factor=rope.high_freq_factor,
                original_max_position_embeddings=rope.original_max_position_embeddings,
            )
