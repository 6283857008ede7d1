"""The likeliest token of each row, read from the logits as they are."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch

from services.worker.native.library import Library
from services.worker.sampling.row_ops import argmax

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class Greedy:
    """Finds each line's largest logit, and which it is.

    Args:
        library: Native CPU kernels; ``None`` = torch computes all.
    """

    def __init__(self, library: Library | None) -> None:
        self._native = None
        if library is not None:
            self._native = library.function(
                "sl_argmax", [c_void_p, c_int, c_int64, c_int64, c_int64, c_void_p, c_void_p]
            )

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first of equal ones, and of a NaN if there is one.

        Args:
            logits: ``[n, vocab_size]``, any float dtype.

        Returns:
            ``[n]`` int64: which; ``[n]`` float32: the logits.
        """
        if self._native is None or logits.dtype not in _NATIVE_DTYPES or logits.stride(1) != 1:
            token_ids = argmax(logits)
            return token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).float()
        num_lines, size = logits.shape
        token_ids = torch.empty(num_lines, dtype=torch.int64)
        scores = torch.empty(num_lines, dtype=torch.float32)
        self._native(
            logits.data_ptr(),
            logits.dtype == torch.bfloat16,
            num_lines,
            size,
            logits.stride(0),
            token_ids.data_ptr(),
            scores.data_ptr(),
        )
        return token_ids, scores
