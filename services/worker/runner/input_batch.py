"""Gathers one step's inputs from the rows, with array operations only.

While a step is prepared the processor waits. So on a step of decodes nothing here gives the
interpreter away to another thread, which would keep it for as long as planning the next step takes:
no sort, no repeat, no arange, and on the CPU no torch operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.common.errors import InvariantError
from services.worker.attention.base import AttentionBatch
from services.worker.runner.request_state import RequestStates
from services.worker.runner.step_input import Ints, indices
from services.worker.sampling.base import to_device


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Inputs of one forward pass. Rows stand decodes first, then longer queries.

    Attributes:
        order: ``[num_reqs]``: where each stood among the rows that were asked for.
        rows: ``[num_reqs]``.
        num_tokens: ``[num_reqs]``: tokens that each computes.
        input_ids: ``[num_tokens]`` int64.
        positions: ``[num_tokens]`` int64.
        attention: The same, as attention sees it.
        first_positions: ``[num_reqs]``: position of each row's first token.
        query_start_loc: ``[num_reqs + 1]``, on the host.
        sampling_index: Which of the ``num_reqs`` sample: their known tokens are all computed, and
            tokens are what they are for.
    """

    order: Ints
    rows: Ints
    num_tokens: Ints
    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    first_positions: Ints
    query_start_loc: Ints
    sampling_index: Ints

    @property
    def sampling_rows(self) -> Ints:
        """``[num_samples]``: the rows that sample."""
        return self.rows[self.sampling_index]

    @property
    def sampling_tokens(self) -> Ints:
        """``[num_samples]``: index of the last token of each row that samples."""
        return self.query_start_loc[1:][self.sampling_index] - 1


def build_input_batch(states: RequestStates, rows: Ints, num_tokens: Ints) -> InputBatch:
    """Gather the inputs of a step.

    Args:
        states: The rows.
        rows: ``[num_reqs]``, at least one, each at most once.
        num_tokens: ``[num_reqs]``: tokens that each computes, > 0.

    Raises:
        InvariantError: A row has fewer tokens or blocks than it shall compute.
    """
    # Decodes first: attention backends treat a run of them as one.
    is_long = num_tokens > 1
    has_long = bool(is_long.any())
    order = indices(rows.size)
    if has_long:
        order = np.concatenate((np.flatnonzero(~is_long), np.flatnonzero(is_long)))
        rows, num_tokens = rows[order], num_tokens[order]
    first = states.num_computed[rows]
    end = first + num_tokens
    _require_known_tokens(states, rows, num_tokens, end)
    query_start_loc = indices(rows.size + 1)
    # Of each token: its row, and its position.
    token_rows, positions = rows, first
    if has_long:
        query_start_loc = np.concatenate(([0], np.cumsum(num_tokens)))
        token_rows = np.repeat(rows, num_tokens)
        positions = indices(token_rows.size) + np.repeat(first - query_start_loc[:-1], num_tokens)
    slots = states.block_table.slots(token_rows, positions)
    device = states.token_ids.device
    return InputBatch(
        order=order,
        rows=rows,
        num_tokens=num_tokens,
        input_ids=states.gather_tokens(token_rows, positions),
        positions=to_device(positions, device),
        attention=AttentionBatch(
            query_start_loc=to_device(query_start_loc.astype(np.int32), device),
            seq_lens=to_device(end.astype(np.int32), device),
            block_table=to_device(
                states.block_table.gather(rows, num_tokens=int(end.max())), device
            ),
            slot_mapping=to_device(slots, device),
            query_start_loc_cpu=query_start_loc.tolist(),
            seq_lens_cpu=end.tolist(),
        ),
        first_positions=first,
        query_start_loc=query_start_loc,
        sampling_index=np.flatnonzero(
            (end == states.num_known[rows]) & states.has_room(rows) & ~states.pools[rows]
        ),
    )


def _require_known_tokens(states: RequestStates, rows: Ints, num_tokens: Ints, end: Ints) -> None:
    bad = (num_tokens < 1) | (end > states.num_known[rows])
    if bad.any():
        i = int(np.argmax(bad))
        raise InvariantError(
            f"row {rows[i]} shall compute {num_tokens[i]} tokens up to {end[i]} and knows "
            f"{states.num_known[rows[i]]}"
        )
