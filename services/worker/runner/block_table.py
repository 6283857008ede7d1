"""Block tables of all rows: which block of the paged cache holds which part of a sequence.

They live on the host, where block ids arrive; each step uploads the part that its rows need.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.common.errors import InvariantError
from services.worker.runner.step_input import Ints, indices


class BlockTable:
    """``[max_num_seqs, max_blocks]`` block ids; past a row's blocks all are 0, the null block."""

    def __init__(self, *, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        """
        Args:
            max_num_seqs: Rows.
            max_blocks: Blocks that one row can have.
            block_size: Tokens of one block.
        """
        self.block_size = block_size
        self._ids = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def clear(self, row: int) -> None:
        """Forget a row's blocks."""
        self._ids[row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0

    def append(self, rows: Ints, *, counts: Ints, block_ids: Ints) -> None:
        """Append blocks to rows.

        Args:
            rows: ``[n]``, each at most once.
            counts: ``[n]``: how many of the flat ``block_ids`` each row gains.
            block_ids: ``[sum(counts)]``.

        Raises:
            InvariantError: More blocks than a row can have, or counts that do not match.
        """
        if not block_ids.size and not counts.any():
            return
        if counts.sum() != block_ids.size:
            raise InvariantError(f"{block_ids.size} block ids for counts of {counts.sum()}")
        lengths = self._num_blocks[rows] + counts
        if lengths.max(initial=0) > self._ids.shape[1]:
            raise InvariantError(
                f"a row would have {lengths.max()} blocks; at most {self._ids.shape[1]} fit"
            )
        if counts.max() == 1:  # as decodes grow; see ``input_batch`` for what is spared
            growing = rows[counts == 1]
            self._ids[growing, self._num_blocks[growing]] = block_ids
        else:
            firsts = np.cumsum(counts) - counts
            starts = np.repeat(firsts - self._num_blocks[rows], counts)
            self._ids[np.repeat(rows, counts), indices(block_ids.size) - starts] = block_ids
        self._num_blocks[rows] = lengths

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Where the KV of tokens lies.

        Args:
            rows: ``[num_tokens]``.
            positions: ``[num_tokens]``: index of each token in its sequence.

        Raises:
            InvariantError: A token lies past its row's blocks.
        """
        blocks = positions // self.block_size
        if (blocks >= self._num_blocks[rows]).any():
            row = int(rows[np.argmax(blocks >= self._num_blocks[rows])])
            raise InvariantError(
                f"row {row} has {self._num_blocks[row]} blocks, too few for its tokens of this step"
            )
        return self._ids[rows, blocks] * np.int64(self.block_size) + positions % self.block_size

    def gather(self, rows: Ints, *, num_tokens: int) -> npt.NDArray[np.int32]:
        """Tables of some rows, as wide as ``num_tokens`` tokens need: ``[n, blocks]``."""
        return self._ids[rows, : -(-num_tokens // self.block_size)]
