"""``bad_words``: a banned sequence's last token is banned once the output ends in the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows

_ANY = -1
"""Stands before a prefix that is shorter than the longest: matches every token."""


@dataclass(frozen=True, slots=True)
class _Words:
    """Banned sequences of one row.

    Attributes:
        prefixes: ``[num_words, longest]``: all tokens but the last, aligned to the right.
        prefix_lens: ``[num_words]``.
        last_ids: ``[num_words]``.
    """

    prefixes: torch.Tensor
    prefix_lens: torch.Tensor
    last_ids: torch.Tensor


class BadWords:
    """Matches outputs only: a word that the prompt begins may be finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_row: dict[int, _Words] = {}

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        self.remove(row)
        words = [ids for ids in params.bad_words_ids if ids]
        if words:
            self._of_row[row] = _pack(words, self._device)
        return bool(words)

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._of_row.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        if not self._of_row:
            return
        for line, row in enumerate(rows.rows.tolist()):
            words = self._of_row.get(row)
            if words is not None:
                self._ban(
                    logits[line], words, rows.token_ids[row], rows.take(slice(line, line + 1))
                )

    def _ban(
        self, line: torch.Tensor, words: _Words, token_ids: torch.Tensor, row: LogitRows
    ) -> None:
        longest = words.prefixes.shape[1]
        end = int(row.num_known[0])
        # Positions before the sequence are clamped; prefix_lens keeps them from counting.
        places = torch.arange(end - longest, end, device=self._device).clamp(min=0)
        tail = token_ids[places]
        matches = ((words.prefixes == tail) | (words.prefixes == _ANY)).all(dim=1)
        matches &= words.prefix_lens <= int(row.num_outputs[0])
        # Added, not assigned: two words may share their last token.
        ban = torch.where(matches, -torch.inf, 0.0)
        line.index_add_(0, words.last_ids, ban)


def _pack(words: list[tuple[int, ...]], device: torch.device) -> _Words:
    longest = max(len(ids) for ids in words) - 1
    prefixes = np.full((len(words), longest), _ANY, dtype=np.int32)
    for i, ids in enumerate(words):
        if len(ids) > 1:
            prefixes[i, longest - len(ids) + 1 :] = ids[:-1]
    return _Words(
        prefixes=torch.from_numpy(prefixes).to(device),
        prefix_lens=torch.tensor([len(ids) - 1 for ids in words], device=device),
        last_ids=torch.tensor([ids[-1] for ids in words], device=device),
    )
