"""Rows of token ids for the sampler's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows
from services.worker.sampling.sampler import Sampler

CPU = torch.device("cpu")
EOS_TOKEN_ID = 3


@dataclass(frozen=True)
class Case:
    """One row: its parameters and its tokens."""

    params: SamplingParams
    prompt: Sequence[int] = (1,)
    outputs: Sequence[int] = ()
    choice: int = 0


def make_rows(cases: Sequence[Case], *, rows: Sequence[int] | None = None) -> LogitRows:
    """Rows that hold the cases' tokens; what lies past them is garbage on purpose."""
    at = list(range(len(cases))) if rows is None else list(rows)
    width = max(len(case.prompt) + len(case.outputs) for case in cases) + 2
    token_ids = torch.full((max(at) + 1, width), 7, dtype=torch.int32)
    for row, case in zip(at, cases, strict=True):
        tokens = torch.tensor([*case.prompt, *case.outputs], dtype=torch.int32)
        token_ids[row, : len(tokens)] = tokens
    return LogitRows(
        rows=np.array(at, dtype=np.int64),
        num_prompt=np.array([len(case.prompt) for case in cases], dtype=np.int64),
        num_known=np.array([len(c.prompt) + len(c.outputs) for c in cases], dtype=np.int64),
        token_ids=token_ids,
    )


def make_sampler(
    cases: Sequence[Case], *, vocab_size: int, rows: Sequence[int] | None = None
) -> Sampler:
    """A sampler that knows the cases' rows."""
    at = list(range(len(cases))) if rows is None else list(rows)
    sampler = Sampler(
        max_num_seqs=max(at) + 1, vocab_size=vocab_size, eos_token_ids=(EOS_TOKEN_ID,), device=CPU
    )
    for row, case in zip(at, cases, strict=True):
        sampler.add(row, case.params, choice=case.choice)
    return sampler


def random_logits(
    num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 4.0
) -> torch.Tensor:
    """Float32 logits, spread by ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale
