"""Token ids, with a value each, that belong to some of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.sampling.base import Ints, to_device


@dataclass(frozen=True, slots=True)
class Entries:
    """Flat (line, token id, value) triples on the device.

    Attributes:
        lines: ``[k]``: line of the logits.
        ids: ``[k]``: token id.
        values: ``[k]`` float32.
        used_lines: ``[m]``: the lines that have entries, each once.
    """

    lines: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    used_lines: torch.Tensor


class RowIds:
    """Lists of token ids by row; rows without a list cost nothing."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: Where the logits are.
        """
        self._device = device
        self._of_row: dict[int, tuple[Ints, npt.NDArray[np.float32]]] = {}

    def set(self, row: int, ids: Sequence[int], values: Sequence[float] = ()) -> bool:
        """Give a row its list.

        Args:
            row: Which row.
            ids: Token ids, each once; an empty list is none.
            values: Parallel to ``ids``; empty = zeros.

        Returns:
            Whether the row has a list now.
        """
        self.discard(row)
        if ids:
            column = np.array(values if values else [0.0] * len(ids), dtype=np.float32)
            self._of_row[row] = (np.array(ids, dtype=np.int64), column)
        return bool(ids)

    def discard(self, row: int) -> None:
        """Take a row's list away, if it has one."""
        self._of_row.pop(row, None)

    def gather(self, rows: Ints) -> Entries | None:
        """The lists of some rows; ``None`` if none of them has one."""
        if not self._of_row:
            return None
        found = [
            (line, *self._of_row[row])
            for line, row in enumerate(rows.tolist())
            if row in self._of_row
        ]
        if not found:
            return None
        used = np.array([line for line, _, _ in found], dtype=np.int64)
        counts = [ids.size for _, ids, _ in found]
        values = torch.from_numpy(np.concatenate([values for _, _, values in found]))
        return Entries(
            lines=to_device(np.repeat(used, counts), self._device),
            ids=to_device(np.concatenate([ids for _, ids, _ in found]), self._device),
            values=values.to(self._device),
            used_lines=to_device(used, self._device),
        )
