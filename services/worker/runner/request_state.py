"""The rows: every running request keeps one from its admission to its end.

A row is an index into ``[max_num_seqs, ...]`` arrays, taken from a free list and never moved (the
reference engine's Model Runner V2 does the same). Token ids live on the device, because sampled
tokens are born there and the next step reads them there; all counts live on the host, which knows
them without reading a token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from services.common.errors import InvariantError
from services.worker.runner.block_table import BlockTable
from services.worker.runner.step_input import Ints, NewRow
from services.worker.sampling.base import to_device

UNKNOWN = -1
"""Row of a handle that has none."""


class RequestStates:
    """Rows of all running requests.

    Attributes:
        token_ids: ``[max_num_seqs, width]`` int32 on the device: prompt, then outputs.
        block_table: Their KV blocks.
        num_prompt: ``[max_num_seqs]``: prompt tokens.
        num_known: Tokens in ``token_ids``, counting those that a launched step samples.
        num_computed: Tokens whose KV is or will be computed by the steps launched.
        has_ended: Rows that sample no more: a row error has ended them.
        pools: Rows that never sample: a vector of their prompt is wanted.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        """
        Args:
            max_num_seqs: Rows.
            max_model_len: Most tokens of one sequence.
            block_size: Tokens of one KV block.
            device: Where token ids live.
        """
        self.token_ids = torch.zeros(
            (max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device
        )
        # The same memory, where the host can reach it: for a few numbers numpy is much the faster.
        self._host_ids = self.token_ids.numpy() if device.type == "cpu" else None
        self.block_table = BlockTable(
            max_num_seqs=max_num_seqs,
            max_blocks=-(-(max_model_len + 1) // block_size),
            block_size=block_size,
        )
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_known = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.has_ended = np.zeros(max_num_seqs, dtype=bool)
        self.pools = np.zeros(max_num_seqs, dtype=bool)
        self._row_of: dict[int, int] = {}
        # Reversed, so that rows are handed out from 0 up: a small batch stays in few pages.
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._row_of)

    @property
    def handles(self) -> list[int]:
        """Handles that have a row."""
        return list(self._row_of)

    def add(self, new: NewRow) -> int:
        """Give a request a row.

        Returns:
            The row.

        Raises:
            InvariantError: The handle has a row already, no row is free, or the request is longer
                than a row or has nothing to compute.
        """
        known = new.token_ids.size
        if new.handle in self._row_of:
            raise InvariantError(f"request {new.handle} has a row already")
        if not self._free:
            raise InvariantError(f"request {new.handle}: all {self.num_rows} rows are taken")
        if not 0 < new.num_prompt_tokens <= known < self.token_ids.shape[1]:
            raise InvariantError(
                f"request {new.handle}: {new.num_prompt_tokens} prompt tokens of {known} known "
                f"ones do not fit a row of {self.token_ids.shape[1] - 1}"
            )
        if not 0 <= new.num_computed_tokens < known:
            raise InvariantError(
                f"request {new.handle}: {new.num_computed_tokens} computed of {known} tokens"
            )
        row = self._free.pop()
        self._row_of[new.handle] = row
        self.token_ids[row, :known] = torch.from_numpy(new.token_ids)
        self.num_prompt[row] = new.num_prompt_tokens
        self.num_known[row] = known
        self.num_computed[row] = new.num_computed_tokens
        self.has_ended[row] = False
        self.pools[row] = new.pools
        self.block_table.append(
            np.array([row]), counts=np.array([new.block_ids.size]), block_ids=new.block_ids
        )
        return row

    def remove(self, handle: int) -> int:
        """Take a request's row back.

        Returns:
            The row it had, or ``UNKNOWN``.
        """
        row = self._row_of.pop(handle, UNKNOWN)
        if row != UNKNOWN:
            self.block_table.clear(row)
            self._free.append(row)
        return row

    def mark_ended(self, handle: int) -> None:
        """Let a request sample no more; nothing happens if it has no row any longer."""
        row = self._row_of.get(handle, UNKNOWN)
        if row != UNKNOWN:
            self.has_ended[row] = True

    def has_room(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """``[n]``: whether a row can hold one more token."""
        return self.num_known[rows] < self.token_ids.shape[1]

    def gather_tokens(self, rows: Ints, positions: Ints) -> torch.Tensor:
        """Tokens of rows, ``[n]`` int64 on the device.

        Args:
            rows: ``[n]``.
            positions: ``[n]``: where in its row each stands.
        """
        if self._host_ids is not None:
            return torch.from_numpy(self._host_ids[rows, positions].astype(np.int64))
        device = self.token_ids.device
        return self.token_ids[to_device(rows, device), to_device(positions, device)].long()

    def append_sampled(self, rows: Ints, token_ids: torch.Tensor) -> None:
        """Append one token to each of some rows.

        Args:
            rows: ``[n]``, each at most once.
            token_ids: ``[n]`` int64 on the device.
        """
        places = self.num_known[rows]
        if self._host_ids is not None:
            self._host_ids[rows, places] = token_ids.numpy()
        else:
            device = self.token_ids.device
            self.token_ids[to_device(rows, device), to_device(places, device)] = token_ids.int()
        self.num_known[rows] += 1

    def rows_of(self, handles: list[int]) -> Ints:
        """``[n]``: the row of each handle, ``UNKNOWN`` where it has none."""
        row_of = self._row_of
        return np.array([row_of.get(handle, UNKNOWN) for handle in handles], dtype=np.int64)
