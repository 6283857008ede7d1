"""The reference implementation's word on greedy outputs: transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

NEAR_TIE = 1e-3
"""Two logits closer than this may change places between batch shapes; the comparison ends there."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a greedy output follows the reference.

    Attributes:
        is_equal: Every token is the reference's, as far as it was compared.
        near_tie_at: Index of the output token at which a near tie was decided the other way.
        detail: What differs, for the message.
    """

    is_equal: bool
    near_tie_at: int | None = None
    detail: str = ""


class Reference:
    """Judges outputs by one forward pass over prompt and output (teacher forcing).

    An output is the greedy one exactly if each of its tokens is the argmax after those before it,
    so that generating it token by token is not needed.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32
        ).eval()
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict] = {}

    def judge(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Verdict:
        """Compare one output; equal questions are answered from memory."""
        key = (tuple(prompt_ids), tuple(output_ids))
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(*key)
        return self._verdicts[key]

    @torch.inference_mode()
    def _judge(self, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...]) -> Verdict:
        ids = torch.tensor([prompt_ids + output_ids[:-1]])
        logits = self._model(ids, logits_to_keep=len(output_ids)).logits[0]
        top = logits.topk(2)
        for index, token_id in enumerate(output_ids):
            best = int(top.indices[index, 0])
            if token_id == best:
                continue
            gap = float(top.values[index, 0] - logits[index, token_id])
            if gap < NEAR_TIE:
                return Verdict(True, near_tie_at=index)
            return Verdict(
                False, detail=f"output token {index}: {token_id}, not {best} (by {gap:.4f})"
            )
        return Verdict(True)
