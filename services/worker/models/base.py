"""The model seam: what a family is built from and what the runner may call on it.

A family lives in a file of this folder named for Hugging Face's ``model_type``. The file has
``read_config(raw: HfConfig) -> ModelConfig`` and
``build(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> CausalLM``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from services.worker.attention.base import AttentionStep
from services.worker.models._hf_config import HfConfig
from services.worker.native.library import Library
from services.worker.quantization.base import QuantizationMethod, QuantizedSlot

__all__ = ["CausalLM", "HfConfig", "ModelConfig", "RopeConfig", "RopeType"]

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, Su et al. 2021) and how it is stretched.

    Attributes:
        rope_type: Which scaling.
        theta: Base of the frequencies.
        rotary_dim: Elements of a head that are rotated, from the first on.
        factor: Stretch of "linear" and "llama3".
        low_freq_factor: Of "llama3".
        high_freq_factor: Of "llama3".
        original_max_position_embeddings: Of "llama3".
    """

    rope_type: RopeType
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama kind, in numbers.

    Attributes:
        model_type: Hugging Face's name of the family.
        vocab_size: Rows of the embedding; token ids are below it.
        hidden_size: Elements of a token's state.
        intermediate_size: Elements inside the MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Elements of one head; need not be ``hidden_size / num_heads``.
        max_position_embeddings: Longest context the model was made for, in tokens.
        rms_norm_eps: Added to the mean square.
        rope: Position embedding.
        tie_word_embeddings: The output head is the embedding.
        qkv_bias: Whether the projections to q, k and v have a bias.
        o_bias: Whether attention's output projection has one.
        mlp_bias: Whether the MLP's projections have one.
        qk_norm: Whether each head's q and k are normalised before rotation.
        sliding_windows: Per layer, tokens that it sees; ``None`` for all.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]


class CausalLM(Protocol):
    """A model that predicts the next token."""

    def quantize(self, method: QuantizationMethod) -> None:
        """Keep the weights of all linear layers in few bits.

        An embedding that is the output head too is one of them. Called at most once, before
        ``weight_slots``.
        """
        ...

    def weight_slots(self) -> Mapping[str, torch.Tensor | QuantizedSlot]:
        """Where each checkpoint tensor goes: its name → the (view of a) parameter to fill.

        Every slot must be filled exactly once, then ``finish_loading`` is called.
        """
        ...

    def finish_loading(self, library: Library | None) -> None:
        """Turn the filled parameters into what the device computes with (packing, for one).

        Args:
            library: Native CPU kernels; ``None`` = torch computes all.
        """
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        kv_caches: Sequence[torch.Tensor],
        attention: AttentionStep,
    ) -> torch.Tensor:
        """Run all layers over the step's tokens.

        Args:
            input_ids: ``[num_tokens]`` int64.
            positions: ``[num_tokens]`` int64, each token's index in its sequence.
            kv_caches: One tensor per layer.
            attention: What ``AttentionBackend.begin_step`` gave for this step.

        Returns:
            ``[num_tokens, hidden_size]``, after the final norm.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project the rows that are wanted to the vocabulary.

        Args:
            hidden: ``[num_rows, hidden_size]``, rows of what ``forward`` gave.

        Returns:
            ``[num_rows, vocab_size]`` in the model's dtype.
        """
        ...
