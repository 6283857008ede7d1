"""Log-probabilities of tokens, in float32 over the whole vocabulary, ranks, and the best others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from services.worker.sampling.row_ops import largest

Ids: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]

ALL = -1
"""Instead of a number of alternatives: the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities of some tokens, on the host, in columns as they go over the wire.

    Attributes:
        logprob: ``[n]``: of the token itself.
        rank: ``[n]``: 1 = nothing is more probable.
        num_top: ``[n]``: how many of the flat ``top_*`` entries belong to each, best first.
        top_ids: Flat.
        top_logprobs: Flat, finite: banned tokens are left out.
    """

    logprob: Floats
    rank: Ids
    num_top: Ids
    top_ids: Ids
    top_logprobs: Floats


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, *, num_top: Sequence[int]
) -> LogprobColumns:
    """Log-probabilities of one token a line.

    Args:
        logits: ``[n, vocab_size]``, any float dtype.
        token_ids: ``[n]`` int64.
        num_top: ``[n]``: alternatives that each line wants; ``ALL`` for the vocabulary.
    """
    logits = logits.float()
    vocab_size = logits.shape[1]
    wanted = np.array([vocab_size if k == ALL else min(k, vocab_size) for k in num_top])
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    values, ids = largest(logits, int(wanted.max(initial=0)))
    top_logprobs = (values - normaliser).cpu().numpy()
    # Read on the host: this is a result, and only rows that asked for it come here.
    keep = np.arange(values.shape[1]) < wanted[:, None]
    keep &= np.isfinite(top_logprobs)
    return LogprobColumns(
        logprob=(chosen - normaliser).squeeze(1).cpu().numpy(),
        rank=(logits >= chosen).sum(dim=-1).cpu().numpy(),
        num_top=keep.sum(axis=1),
        top_ids=ids.cpu().numpy()[keep],
        top_logprobs=top_logprobs[keep],
    )


def concatenate(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """The parts one after another; at least one."""
    return LogprobColumns(
        logprob=np.concatenate([part.logprob for part in parts]),
        rank=np.concatenate([part.rank for part in parts]),
        num_top=np.concatenate([part.num_top for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
