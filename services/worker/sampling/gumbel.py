"""Draws from softmax(logits) by the Gumbel-max trick, with noise that only the key decides.

Token ``v`` of a draw with key ``k`` has the noise ``g(k, v)``, so a draw depends on its logits and
its key and on nothing else: not on the batch, the row, chunking, preemption or the worker. The
generator is counter-based: the 32-bit mixer "lowbias32" (Wellons 2018) over the token's counter,
the low half of the key added before and the high half xored in between its two multiplications.

The noise is ``-ln(-ln(1 - u))`` with ``u = (i + 1/2) / 2**31``: the end that wins, ``u`` near 0, is
exact in float32, so a token 18 below the best is still drawn as often as it should be.
"""

from __future__ import annotations

import numpy as np
import torch

from services.worker.sampling.draw_keys import Keys
from services.worker.sampling.row_ops import argmax

_COUNTER_STEP = 0x9E3779B1  # odd: a bijection of the token ids
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_TO_UNIT = 2.0**-31 * (1 - 2.0**-23)  # a little short: float32 would round the largest up to 1


class GumbelDraw:
    """Draws one token a line. Holds the vocabulary's counters."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        """
        Args:
            vocab_size: Tokens.
            device: Where the logits are.
        """
        counters = torch.arange(vocab_size, dtype=torch.int64) * _COUNTER_STEP
        self._counters = _wrap(counters).to(device)

    def draw(self, logits: torch.Tensor, keys: Keys) -> torch.Tensor:
        """Draw from ``softmax(logits)``.

        Args:
            logits: ``[n, vocab_size]`` float32; minus infinity is never drawn unless all are.
            keys: ``[n]``.

        Returns:
            ``[n]`` int64; of a line with a NaN, a place of one.
        """
        return argmax(logits + self.noise(keys))

    def noise(self, keys: Keys) -> torch.Tensor:
        """Standard Gumbel noise, finite: ``[n, vocab_size]`` float32."""
        halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy())
        low, high = halves.to(self._counters.device).unsqueeze(-1).unbind(1)
        uniform = _mix32(self._counters + low, high).float().add_(0.5).mul_(_TO_UNIT)
        return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(x: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """The mixer, in place.

    Args:
        x: ``[n, vocab_size]`` int32 counters.
        between: ``[n, 1]`` int32.

    Returns:
        ``x``, uniform over 0 .. 2**31 - 1.
    """
    first, second = (_signed(m) for m in _MULTIPLIERS)
    x ^= (x >> 16) & 0xFFFF
    x *= first
    x ^= between
    x ^= (x >> 15) & 0x1FFFF
    x *= second
    # The shift may carry the sign along: the bit that it spoils is masked off, the others stay
    # uniform.
    x ^= x >> 15
    x &= 0x7FFFFFFF
    return x


def _wrap(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 as int32."""
    return ((values + 2**31) % 2**32 - 2**31).to(torch.int32)


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
