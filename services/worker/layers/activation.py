"""The gated activation of Llama's MLP (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a fused projection.

    Args:
        gate_up: ``[num_tokens, 2 * size]``, gates first.

    Returns:
        ``[num_tokens, size]``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
