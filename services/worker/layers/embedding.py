"""The token embedding, which may be the output head as well."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from services.worker.layers.linear_kernel import (
    LinearKernel,
    Lookup,
    make_linear_kernel,
    make_quantized_kernel,
)
from services.worker.layers.native_linear import NativeLinear
from services.worker.native.library import Library
from services.worker.quantization.base import Quantize, QuantizedSlot


class Embedding:
    """A row of ``hidden_size`` elements per token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weight: torch.Tensor | None = torch.empty(
            vocab_size, hidden_size, dtype=dtype, device=device
        )
        self._native: NativeLinear | None = None
        self._lookup: Lookup = self._plain_lookup
        self._dtype = dtype
        self._quantized: QuantizedSlot | None = None

    def quantize(self, quantize: Quantize) -> None:
        """Keep the table, which is yet to be loaded, in the form that ``quantize`` makes.

        For a table that is the output head too: its ``TiedHead`` gives the way to look it up.
        """
        assert self._weight is not None, "quantize comes before loading"
        shape = (self._weight.shape[0], self._weight.shape[1])
        self._quantized = QuantizedSlot(shape, quantize, device=self._weight.device)
        self._weight = None

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor | QuantizedSlot]]:
        """Checkpoint name and place of the table."""
        yield f"{prefix}.weight", self._weight if self._quantized is None else self._quantized

    def make_head(self, library: Library | None) -> LinearKernel:
        """The filled table as the output head; all that stays, where that can be looked up."""
        if self._quantized is not None:
            head = make_quantized_kernel(
                self._quantized.take(), None, dtype=self._dtype, library=library
            )
        else:
            assert self._weight is not None, "one head is made"
            head = make_linear_kernel(self._weight, None, library=library)
        if head.lookup is not None:
            self._lookup = head.lookup
            self._weight = None
        if isinstance(head, NativeLinear):
            self._native = head
        return head

    @property
    def source(self) -> torch.Tensor | NativeLinear:
        """What is looked up: the plain table, or the native head that holds the only copy."""
        if self._native is not None:
            return self._native
        assert self._weight is not None, "a table without a native head stays"
        return self._weight

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[num_tokens]`` int64 → ``[num_tokens, hidden_size]``, a fresh tensor."""
        return self._lookup(input_ids)

    def _plain_lookup(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None, "a table without a head of its own stays"
        return functional.embedding(input_ids, self._weight)


class TiedHead:
    """The embedding used as the output head.

    There is one table where the head's kernel can look it up. oneDNN's cannot: there the head is a
    second copy, for 2.2 to 3.4 times the speed of what is often the largest product of a decode
    step.
    """

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        self._kernel: LinearKernel | None = None

    def quantize(self, quantize: Quantize) -> None:
        """See ``Embedding.quantize``."""
        self._embedding.quantize(quantize)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, torch.Tensor | QuantizedSlot]]:
        """None of its own."""
        yield from ()

    def finish_loading(self, library: Library | None) -> None:
        """Make the kernel over the filled table."""
        self._kernel = self._embedding.make_head(library)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` → ``[num_rows, vocab_size]``."""
        assert self._kernel is not None, "finish_loading comes first"
        return self._kernel(hidden)
