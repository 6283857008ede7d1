"""The blocks that families of the Llama kind are put together from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from services.worker.attention.base import AttentionStep
from services.worker.layers.linear import Linear
from services.worker.layers.rms_norm import RmsNorm
from services.worker.layers.rotary import Rotation
from services.worker.models._native_decoder import NativeLayer
from services.worker.models.base import ModelConfig
from services.worker.native.library import Library
from services.worker.quantization.base import Quantize, QuantizedSlot

Slots = Iterator[tuple[str, torch.Tensor | QuantizedSlot]]


class SelfAttention:
    """Grouped-query attention with rotary positions; biases, q/k norms and window as configured.

    Attributes:
        qkv: Fused projection.
        out: Output projection.
        norms: Of queries and of keys, per head; ``None`` without.
        window: See ``ModelConfig.sliding_windows``.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_size = config.head_size
        self._scale = config.head_size**-0.5
        self.window = config.sliding_windows[layer]
        q_size = config.num_heads * config.head_size
        kv_size = config.num_kv_heads * config.head_size
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(
            q_size, {"o_proj": config.hidden_size}, bias=config.o_bias, dtype=dtype, device=device
        )
        self.norms: tuple[RmsNorm, RmsNorm] | None = None
        if config.qk_norm:
            self.norms = (
                RmsNorm(config.head_size, eps=config.rms_norm_eps, dtype=dtype, device=device),
                RmsNorm(config.head_size, eps=config.rms_norm_eps, dtype=dtype, device=device),
            )

    def weight_slots(self, prefix: str) -> Slots:
        """Checkpoint names and places of all weights."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.out.weight_slots(prefix)
        if self.norms is not None:
            yield from self.norms[0].weight_slots(f"{prefix}q_norm")
            yield from self.norms[1].weight_slots(f"{prefix}k_norm")

    def quantize(self, quantize: Quantize) -> None:
        """See ``CausalLM.quantize``."""
        self.qkv.quantize(quantize)
        self.out.quantize(quantize)

    def finish_loading(self, library: Library | None) -> None:
        """See ``CausalLM.finish_loading``."""
        self.qkv.finish_loading(library)
        self.out.finish_loading(library)

    def __call__(
        self,
        hidden: torch.Tensor,
        *,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        attention: AttentionStep,
    ) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` → the same."""
        heads = self.qkv(hidden).view(len(hidden), -1, self._head_size)
        # Queries and keys stand side by side in the fused output: one rotation does both.
        num_rotated = self._num_heads + self._num_kv_heads
        rotated = rotation.apply(self._normalised(heads[:, :num_rotated]))
        attended = attention.attend(
            rotated[:, : self._num_heads],
            rotated[:, self._num_heads :],
            heads[:, num_rotated:],
            kv_cache=kv_cache,
            scale=self._scale,
            sliding_window=self.window,
        )
        return self.out(attended.flatten(1))

    def _normalised(self, query_key: torch.Tensor) -> torch.Tensor:
        if self.norms is None:
            return query_key
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        return torch.cat((self.norms[0](query), self.norms[1](key)), dim=1)


class Mlp:
    """SwiGLU: ``down(silu(gate(x)) * up(x))``.

    Attributes:
        gate_up: Fused projections and what is between them.
        down: Output projection.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        inner = config.intermediate_size
        self.gate_up = Linear(
            config.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            is_gated=True,
        )
        self.down = Linear(
            inner,
            {"down_proj": config.hidden_size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def weight_slots(self, prefix: str) -> Slots:
        """Checkpoint names and places of all weights."""
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(prefix)

    def quantize(self, quantize: Quantize) -> None:
        """See ``CausalLM.quantize``."""
        self.gate_up.quantize(quantize)
        self.down.quantize(quantize)

    def finish_loading(self, library: Library | None) -> None:
        """See ``CausalLM.finish_loading``."""
        self.gate_up.finish_loading(library)
        self.down.finish_loading(library)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` → the same."""
        return self.down(self.gate_up(hidden))


class DecoderLayer:
    """Attention, then MLP, each behind a norm (pre-norm)."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._attention_norm = RmsNorm(size, eps=eps, dtype=dtype, device=device)
        self._attention = SelfAttention(config, layer, dtype=dtype, device=device)
        self._mlp_norm = RmsNorm(size, eps=eps, dtype=dtype, device=device)
        self._mlp = Mlp(config, dtype=dtype, device=device)

    def weight_slots(self, prefix: str) -> Slots:
        """Checkpoint names and places of all weights."""
        yield from self._attention_norm.weight_slots(f"{prefix}input_layernorm")
        yield from self._attention.weight_slots(f"{prefix}self_attn.")
        yield from self._mlp_norm.weight_slots(f"{prefix}post_attention_layernorm")
        yield from self._mlp.weight_slots(f"{prefix}mlp.")

    def quantize(self, quantize: Quantize) -> None:
        """See ``CausalLM.quantize``."""
        self._attention.quantize(quantize)
        self._mlp.quantize(quantize)

    def finish_loading(self, library: Library | None) -> None:
        """See ``CausalLM.finish_loading``."""
        self._attention.finish_loading(library)
        self._mlp.finish_loading(library)

    def native(self) -> NativeLayer:
        """The layer as the native decoder takes it, once its linears are native."""
        attention, mlp = self._attention, self._mlp
        norms = attention.norms
        return NativeLayer(
            qkv=attention.qkv.native.handle,
            out=attention.out.native.handle,
            gate_up=mlp.gate_up.native.handle,
            down=mlp.down.native.handle,
            norms=(self._attention_norm.weight, self._mlp_norm.weight),
            head_norms=None if norms is None else (norms[0].weight, norms[1].weight),
            window=attention.window,
        )

    def __call__(
        self,
        added: torch.Tensor | None,
        residual: torch.Tensor,
        *,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        attention: AttentionStep,
    ) -> torch.Tensor:
        """Run the layer; ``residual`` is updated in place.

        Args:
            added: ``[num_tokens, hidden_size]``, what the layer before has yet to add to the
                residual; ``None`` in the first layer.
            residual: ``[num_tokens, hidden_size]``.
            rotation: Of the step's positions.
            kv_cache: This layer's.
            attention: Of this step.

        Returns:
            What is yet to be added to the residual: the next norm adds and normalises in one go.
        """
        if added is None:
            hidden = self._attention_norm(residual)
        else:
            hidden = self._attention_norm.add_and_norm(added, residual)
        attended = self._attention(
            hidden, rotation=rotation, kv_cache=kv_cache, attention=attention
        )
        return self._mlp(self._mlp_norm.add_and_norm(attended, residual))
