"""The attention seam: what a backend is given and what it must do.

A backend lives in a file of this folder; the file's name is its name, and the file has one function
``build(spec: AttentionSpec) -> AttentionBackend`` that raises ``ConfigError`` for what it cannot
do. Once a step the runner calls ``backend.begin_step(batch)``; the model's layers then call
``attend`` on the ``AttentionStep`` that came back, each with its own cache tensor. A backend knows
neither requests nor models.

The KV cache of a layer is ``[2, num_blocks, block_size, num_kv_heads, head_size]`` (keys, then
values), after PagedAttention (Kwon et al. 2023, section 4.1). A *slot* is ``block_id * block_size +
offset``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from services.worker.native.library import Library


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What all attention layers of a model have in common.

    Attributes:
        num_heads: Query heads; a multiple of ``num_kv_heads``.
        num_kv_heads: Key and value heads.
        head_size: Elements of one head.
        block_size: Tokens of one KV block.
        dtype: Of queries, keys, values and the cache.
        device: Where all tensors live.
        library: Native CPU kernels, where there are any.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    library: Library | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's requests, as attention sees them.

    Request ``i`` owns the query tokens ``query_start_loc[i] : query_start_loc[i + 1]``: the last
    ones of its ``seq_lens[i]`` tokens of context. Tokens past ``query_start_loc[-1]`` are padding:
    nothing is written for them and what is attended for them is undefined.

    Attributes:
        query_start_loc: ``[num_reqs + 1]`` int32.
        seq_lens: ``[num_reqs]`` int32, this step's tokens included.
        block_table: ``[num_reqs, max_blocks]`` int32; what lies past a request's blocks is 0.
        slot_mapping: ``[num_tokens]`` int64, the slot of each token.
        query_start_loc_cpu: The same as a Python list: planning must not read the device.
        seq_lens_cpu: The same as a Python list.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_cpu: Sequence[int]
    seq_lens_cpu: Sequence[int]

    @property
    def num_reqs(self) -> int:
        """Requests of the step."""
        return len(self.seq_lens_cpu)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step, without padding."""
        return self.query_start_loc_cpu[-1]

    @property
    def query_lens(self) -> list[int]:
        """Query tokens of each request."""
        starts = self.query_start_loc_cpu
        return [end - start for start, end in pairwise(starts)]

    @property
    def max_query_len(self) -> int:
        """Query tokens of the longest query; 0 without requests."""
        return max(self.query_lens, default=0)

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest context; 0 without requests."""
        return max(self.seq_lens_cpu, default=0)


class AttentionStep(Protocol):
    """Attention over one batch: what was computed once a step, for all layers to use."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Write the layer's new keys and values, then attend.

        *All* of the layer's keys and values are written before any is read: two requests of one
        step may share blocks that this very step fills.

        Args:
            query: ``[num_tokens, num_heads, head_size]``, rotated.
            key: ``[num_tokens, num_kv_heads, head_size]``, rotated.
            value: ``[num_tokens, num_kv_heads, head_size]``.
            kv_cache: The layer's cache, see the module; written in place.
            scale: Multiplies the scores, usually ``head_size ** -0.5``.
            sliding_window: Each token sees itself and at most ``sliding_window - 1`` before it;
                ``None`` for all before it.

        Returns:
            ``[num_tokens, num_heads, head_size]``, contiguous.
        """
        ...


class AttentionBackend(Protocol):
    """An attention implementation for one model on one device."""

    def begin_step(self, batch: AttentionBatch) -> AttentionStep:
        """Compute what all layers of the step share (masks, gather indices, kernel plans)."""
        ...
