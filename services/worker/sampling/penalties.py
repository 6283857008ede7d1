"""Repetition, frequency and presence penalties.

Repetition looks at prompt and output, the other two at the output only. Nothing is counted ahead:
each step reads the row's token ids, so a resumed request is penalised as if it had never stopped.
"""

from __future__ import annotations

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.sampling.base import LogitRows, to_device


class Penalties:
    """See ``LogitsTransform``."""

    def __init__(self, *, max_num_seqs: int, device: torch.device) -> None:
        """
        Args:
            max_num_seqs: Rows.
            device: Where the logits are.
        """
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._is_used = np.zeros(max_num_seqs, dtype=bool)
        self._device = device

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        is_used = (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )
        self._is_used[row] = is_used
        return is_used

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._is_used[row] = False

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        used = np.flatnonzero(self._is_used[rows.rows])
        if not used.size:
            return
        seen = _SeenTokens(rows.take(used), self._device)
        lines = to_device(used, self._device).unsqueeze(1)
        of_row = rows.rows[used]
        if (self._repetition[of_row] != 1).any():
            _repetition(logits, lines, seen, self._column(self._repetition[of_row]))
        if not (rows.num_outputs[used] > 0).any():
            return
        if (self._frequency[of_row] != 0).any():
            _frequency(logits, lines, seen, self._column(self._frequency[of_row]))
        if (self._presence[of_row] != 0).any():
            _presence(logits, lines, seen, self._column(self._presence[of_row]))

    def _column(self, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device).unsqueeze(1)


class _SeenTokens:
    """Token ids of some rows as rectangles; what is not a row's own repeats one that is.

    Repeats are harmless to repetition and presence, which a token gets once however often it
    occurs.

    Attributes:
        all_ids: ``[n, length]``: prompt and output.
        output_ids: ``[n, length]``: output only; means nothing for a row without output.
        is_output: ``[n, length]``: 1.0 where ``output_ids`` is a token of its own, else 0.0.
        has_output: ``[n, 1]``: 1.0 or 0.0.
    """

    def __init__(self, rows: LogitRows, device: torch.device) -> None:
        length = int(rows.num_known.max())
        ids = rows.token_ids[to_device(rows.rows, device), :length].long()
        at = torch.arange(length, device=device)
        num_known = to_device(rows.num_known, device).unsqueeze(1)
        num_prompt = to_device(rows.num_prompt, device).unsqueeze(1)
        self.all_ids = torch.where(at < num_known, ids, ids[:, :1])
        is_output = (at >= num_prompt) & (at < num_known)
        first_output = ids.gather(1, num_prompt.clamp(max=length - 1))
        self.output_ids = torch.where(is_output, ids, first_output)
        self.is_output = is_output.float()
        self.has_output = (num_known > num_prompt).float()


def _repetition(
    logits: torch.Tensor, lines: torch.Tensor, seen: _SeenTokens, penalty: torch.Tensor
) -> None:
    old = logits[lines, seen.all_ids]
    logits[lines, seen.all_ids] = torch.where(old > 0, old / penalty, old * penalty)


def _frequency(
    logits: torch.Tensor, lines: torch.Tensor, seen: _SeenTokens, penalty: torch.Tensor
) -> None:
    change = -penalty * seen.is_output
    logits.index_put_((lines, seen.output_ids), change, accumulate=True)


def _presence(
    logits: torch.Tensor, lines: torch.Tensor, seen: _SeenTokens, penalty: torch.Tensor
) -> None:
    old = logits[lines, seen.output_ids]
    logits[lines, seen.output_ids] = old - penalty * seen.has_output
