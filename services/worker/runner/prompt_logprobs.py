"""Log-probabilities of prompt tokens, chunk by chunk as the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.runner.input_batch import InputBatch
from services.worker.runner.request_state import RequestStates
from services.worker.runner.step_output import PromptLogprobChunk
from services.worker.sampling.logprobs import concatenate, logprobs_of

_SLICE_BYTES = 64 << 20
"""Float32 logits that exist at a time: a long prompt's would not fit the memory."""


class PromptLogprobs:
    """Which rows want log-probabilities of their prompt, and how many alternatives."""

    def __init__(self, *, vocab_size: int) -> None:
        """
        Args:
            vocab_size: Width of the logits.
        """
        self._slice_lines = max(1, _SLICE_BYTES // (4 * vocab_size))
        self._wanted: dict[int, tuple[int, int]] = {}  # row -> (handle, alternatives)

    def add(self, row: int, params: SamplingParams, *, handle: int, is_done: bool) -> None:
        """Take a request's wish for its row.

        Args:
            row: Its row.
            params: Say how many alternatives, if any.
            handle: For the chunks.
            is_done: An earlier life has delivered them all.
        """
        if params.prompt_logprobs is not None and not is_done:
            self._wanted[row] = (handle, params.prompt_logprobs)

    def remove(self, row: int) -> None:
        """Forget a row; harmless for one that wanted nothing."""
        self._wanted.pop(row, None)

    def chunks(
        self,
        states: RequestStates,
        batch: InputBatch,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[PromptLogprobChunk]:
        """Chunks of this step.

        Args:
            states: The rows.
            batch: The step's inputs.
            hidden: ``[num_tokens, hidden_size]``; the state at position i predicts token i + 1.
            compute_logits: The model's output head.
        """
        if not self._wanted:
            return []
        found = []
        for i, row in enumerate(batch.rows.tolist()):
            if row not in self._wanted:
                continue
            first = int(batch.first_positions[i])
            # The last prompt token predicts an output, not a prompt token.
            end = min(first + int(batch.num_tokens[i]), int(states.num_prompt[row]) - 1)
            if end > first:
                begin = int(batch.query_start_loc[i])
                lines = hidden[begin : begin + end - first]
                targets = states.token_ids[row, first + 1 : end + 1].long()
                found.append(self._chunk(row, first + 1, lines, targets, compute_logits))
        return found

    def _chunk(
        self,
        row: int,
        start: int,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> PromptLogprobChunk:
        handle, num_top = self._wanted[row]
        parts = []
        for at in range(0, len(targets), self._slice_lines):
            ids = targets[at : at + self._slice_lines]
            logits = compute_logits(hidden[at : at + self._slice_lines])
            parts.append(logprobs_of(logits, ids, num_top=[num_top] * len(ids)))
        token_ids = targets.cpu().numpy().astype(np.int64)
        return PromptLogprobChunk(handle, start, token_ids, concatenate(parts))
