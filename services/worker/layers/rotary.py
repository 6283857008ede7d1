"""Rotary position embedding (RoFormer, Su et al. 2021), halves paired as in GPT-NeoX.

Angles are computed once a step for the step's own positions, in float32: a table of all positions
would cost tens of megabytes for long contexts and save nothing that shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines for the tokens of one step.

    Attributes:
        cos: ``[num_tokens, 1, rotary_dim]``.
        sin: The same, negated in the first half.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate the first ``rotary_dim`` elements of every head.

        Args:
            heads: ``[num_tokens, num_heads, head_size]``; queries and keys may stand side by side.

        Returns:
            A fresh tensor of the same shape.
        """
        rotary_dim = self.cos.shape[-1]
        if rotary_dim == heads.shape[-1]:
            return self._rotate(heads)
        rotated = self._rotate(heads[..., :rotary_dim])
        return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        return torch.addcmul(x * self.cos, swapped, self.sin)


class RotaryEmbedding:
    """Makes rotations from positions.

    Args:
        inverse_frequencies: ``[rotary_dim / 2]`` float32, radians per position.
        dtype: Of the rotations.
    """

    def __init__(self, inverse_frequencies: torch.Tensor, *, dtype: torch.dtype) -> None:
        self._inverse_frequencies = inverse_frequencies
        self._dtype = dtype

    @property
    def inverse_frequencies(self) -> torch.Tensor:
        """``[rotary_dim / 2]`` float32, radians per position."""
        return self._inverse_frequencies

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotations of tokens at ``positions`` (``[num_tokens]`` int64)."""
        angles = positions.float()[:, None, None] * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            cos=torch.cat((cos, cos), dim=-1).to(self._dtype),
            sin=torch.cat((-sin, sin), dim=-1).to(self._dtype),
        )


def default_frequencies(theta: float, rotary_dim: int, *, device: torch.device) -> torch.Tensor:
    """``theta ** (-2i / rotary_dim)``, ``[rotary_dim / 2]`` float32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return (1.0 / theta**exponents).to(device)


def llama3_frequencies(
    frequencies: torch.Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> torch.Tensor:
    """Stretch slow frequencies, keep fast ones, blend between (Llama 3.1's scheme).

    Args:
        frequencies: ``[rotary_dim / 2]``, unscaled.
        factor: How far slow frequencies are stretched.
        low_freq_factor: Waves longer than the original context over this are slow.
        high_freq_factor: Waves shorter than the original context over this are fast.
        original_max_position_embeddings: Tokens.
    """
    wavelengths = 2 * math.pi / frequencies
    turns = original_max_position_embeddings / wavelengths
    blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies
