"""The token embedding, which may be the output head as well."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from services.worker.layers.linear_kernel import LinearKernel, make_linear_kernel
from services.worker.layers.native_linear import NativeLinear
from services.worker.native.library import Library


class Embedding:
    """A row of ``hidden_size`` elements per token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weight: torch.Tensor | None = torch.empty(
            vocab_size, hidden_size, dtype=dtype, device=device
        )
        self._head: NativeLinear | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The plain table."""
        assert self._weight is not None, "the table was given to the head"
        return self._weight

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint name and place of the table."""
        yield f"{prefix}.weight", self.weight

    def look_up_in(self, head: NativeLinear) -> None:
        """Use the head's copy of the table from here on; the plain one is let go."""
        self._head = head
        self._weight = None

    @property
    def source(self) -> torch.Tensor | NativeLinear:
        """What is looked up: the plain table, or the head that holds the only copy."""
        return self.weight if self._head is None else self._head

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[num_tokens]`` int64 → ``[num_tokens, hidden_size]``, a fresh tensor."""
        if self._head is not None:
            return self._head.lookup(input_ids)
        return functional.embedding(input_ids, self.weight)


class TiedHead:
    """The embedding used as the output head.

    The native kernel's packed table is looked up as well, so there is one table. oneDNN's cannot
    be: there the head is a second copy, for 2.2 to 3.4 times the speed of what is often the largest
    product of a decode step.
    """

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        self._kernel: LinearKernel | None = None

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """None of its own."""
        yield from ()

    def finish_loading(self, library: Library | None) -> None:
        """Make the kernel over the filled table."""
        self._kernel = make_linear_kernel(self._embedding.weight, None, library=library)
        if isinstance(self._kernel, NativeLinear):
            self._embedding.look_up_in(self._kernel)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` → ``[num_rows, vocab_size]``."""
        assert self._kernel is not None, "finish_loading comes first"
        return self._kernel(hidden)
