"""Root mean square normalisation (Zhang & Sennrich 2019), with the residual add in front."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional


class RmsNorm:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, computed in float32."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = [size]
        self._eps = eps
        self._weight = torch.empty(size, dtype=dtype, device=device)

    @property
    def weight(self) -> torch.Tensor:
        """``[size]``."""
        return self._weight

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint name and place of the weight."""
        yield f"{prefix}.weight", self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., size]``."""
        return functional.rms_norm(x, self._shape, self._weight, self._eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add ``x`` to the residual in place, and normalise the sum.

        Args:
            x: ``[num_tokens, size]``, what the layer before added.
            residual: ``[num_tokens, size]``; holds the sum afterwards.
        """
        return self(residual.add_(x))
