"""Bans the tokens that a row's grammar does not allow next.

Comes first, on the raw logits, so that log-probabilities are those of the constrained choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.sampling.base import Ints


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """What the grammars allow in this step.

    Attributes:
        lines: ``[k]`` int64: lines of the logits that have a grammar.
        bitmask: ``[k, ceil(vocab_size / 32)]`` int32, see ``apply_grammar_mask``.
        ending_lines: Lines, on the host, of which nothing is left but to end.
    """

    lines: torch.Tensor
    bitmask: torch.Tensor
    ending_lines: Ints


def apply_grammar_mask(logits: torch.Tensor, *, lines: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set the logits of banned tokens to minus infinity, in place.

    Args:
        logits: ``[n, vocab_size]``, any float dtype.
        lines: ``[k]`` int64: the lines that have a grammar.
        bitmask: ``[k, ceil(vocab_size / 32)]`` int32; bit ``v % 32`` of word ``v // 32`` is set if
            token ``v`` is allowed.
    """
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    logits[lines] = logits[lines].masked_fill(allowed == 0, -torch.inf)
