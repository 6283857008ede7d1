"""The reference implementation's word on greedy outputs: transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

NUM_NEW = 32
"""Output tokens that every mode generates for every prompt."""

NEAR_TIE = 1e-3
"""Two logits closer than this may change places between batch shapes; the comparison ends there."""

MAX_NEAR_TIES = 2
"""Comparisons of one whole test run that may end so."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a greedy output follows the reference.

    Attributes:
        is_equal: Every token is the reference's, as far as it was compared.
        is_near_tie: The comparison ended where a near tie was decided the other way.
        detail: What differs, for the message.
    """

    is_equal: bool
    is_near_tie: bool = False
    detail: str = ""


class Reference:
    """Judges outputs by one forward pass over prompt and output (teacher forcing).

    An output is the greedy one exactly if each of its tokens is the argmax after those before it,
    so that generating it token by token is not needed. Equal outputs of other modes are judged from
    memory.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32
        ).eval()
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict] = {}
        self._num_near_ties = 0

    def require_parity(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Fail unless an output is the reference's."""
        assert len(output_ids) == NUM_NEW
        verdict = self._judge(tuple(prompt_ids), tuple(output_ids))
        where = f"prompt of {len(prompt_ids)} tokens, {list(prompt_ids[:8])}...: {verdict.detail}"
        assert verdict.is_equal, where
        self._num_near_ties += verdict.is_near_tie
        assert self._num_near_ties <= MAX_NEAR_TIES, where

    def _judge(self, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...]) -> Verdict:
        key = (prompt_ids, output_ids)
        if key not in self._verdicts:
            self._verdicts[key] = self._compare(*key)
        return self._verdicts[key]

    @torch.inference_mode()
    def _compare(self, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...]) -> Verdict:
        ids = torch.tensor([prompt_ids + output_ids[:-1]])
        logits = self._model(ids, logits_to_keep=len(output_ids), use_cache=False).logits[0]
        best = logits.argmax(-1).tolist()
        for index, token_id in enumerate(output_ids):
            if token_id == best[index]:
                continue
            gap = float(logits[index, best[index]] - logits[index, token_id])
            detail = f"output token {index} is {token_id}, not {best[index]} (by {gap:.5f})"
            is_near_tie = gap < NEAR_TIE
            return Verdict(is_near_tie, is_near_tie=is_near_tie, detail=detail)
        return Verdict(True)


@cache
def reference_of(model_dir: Path) -> Reference:
    """The reference of a model; one for a whole test run, as the near ties of all modes count."""
    return Reference(model_dir)
