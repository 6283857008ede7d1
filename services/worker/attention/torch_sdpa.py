"""Reference attention: gather the context by block table, then torch's SDPA.

Correct first, on any device that torch knows. Requests of similar shape are padded and computed
together; what is padded reads slot 0 of the null block, which is always zero, so that a stale NaN
in a reused block can never leak past its mask. Copying the context costs memory traffic that
kernels which walk the block table do not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from services.common.errors import ConfigError
from services.worker.attention._row_groups import group_rows
from services.worker.attention.base import AttentionBatch, AttentionSpec

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def build(spec: AttentionSpec) -> TorchSdpaBackend:
    """Make the backend for one model.

    Raises:
        ConfigError: Query heads are no multiple of KV heads, or the dtype has no SDPA.
    """
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"torch_sdpa: {spec.num_heads} query heads are no multiple of"
            f" {spec.num_kv_heads} KV heads"
        )
    if spec.dtype not in _DTYPES:
        raise ConfigError(f"torch_sdpa: dtype {spec.dtype} is not supported")
    return TorchSdpaBackend(spec)


class TorchSdpaBackend:
    """Makes a ``TorchSdpaStep`` of each batch."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def begin_step(self, batch: AttentionBatch) -> TorchSdpaStep:
        """Group the batch; what depends on the window follows with the first layer that has it."""
        groups = [
            _Group(batch, rows, spec=self._spec)
            for rows in group_rows(batch.query_lens, batch.seq_lens_cpu)
        ]
        return TorchSdpaStep(batch, groups)


class TorchSdpaStep:
    """Attention over one batch."""

    def __init__(self, batch: AttentionBatch, groups: list[_Group]) -> None:
        self._num_tokens = batch.num_tokens
        self._slots = batch.slot_mapping[: self._num_tokens]
        self._groups = groups

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
        """See ``AttentionStep.attend``."""
        keys, values = kv_cache.flatten(1, 2).unbind(0)
        keys.index_copy_(0, self._slots, key[: self._num_tokens])
        values.index_copy_(0, self._slots, value[: self._num_tokens])
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._groups:
            group.attend(
                query, keys, values, scale=scale, sliding_window=sliding_window, output=output
            )
        return output


@dataclass(frozen=True, slots=True)
class _Context:
    """What a group reads through one window.

    Attributes:
        slots: ``[num_rows * num_keys]`` int64; 0 where there is nothing.
        num_keys: Padded keys of a row.
        mask: ``[num_rows, 1, num_queries, num_keys]``, added to the scores; ``None`` hides nothing.
        is_causal: The mask is the plain lower triangle, which SDPA knows without one.
    """

    slots: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None
    is_causal: bool


class _Group:
    """Requests that are padded and computed together."""

    def __init__(self, batch: AttentionBatch, rows: list[int], *, spec: AttentionSpec) -> None:
        self._spec = spec
        starts = batch.query_start_loc_cpu
        query_lens = [starts[row + 1] - starts[row] for row in rows]
        self._num_rows = len(rows)
        self._num_queries = max(query_lens)
        self._max_seq_len = max(batch.seq_lens_cpu[row] for row in rows)
        index = torch.tensor(rows, device=spec.device)
        self._seq_lens = batch.seq_lens.long()[index]
        self._block_table = batch.block_table[index]
        first_query = batch.query_start_loc.long()[index]
        self._query_lens = batch.query_start_loc.long()[index + 1] - first_query
        # A padded query repeats the request's last one: its result is the same, so writing it twice
        # is harmless, and no row is ever masked in full.
        offsets = torch.arange(self._num_queries, device=spec.device)
        offsets = torch.minimum(offsets, self._query_lens[:, None] - 1)
        self._query_index = (first_query[:, None] + offsets).flatten()
        self._query_positions = self._seq_lens[:, None] - self._query_lens[:, None] + offsets
        self._contexts: dict[int | None, _Context] = {}

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        output: torch.Tensor,
    ) -> None:
        """Attend for the group's tokens and write their rows of ``output``."""
        context = self._context(sliding_window)
        attended = functional.scaled_dot_product_attention(
            self._by_head(query.index_select(0, self._query_index), self._num_queries),
            self._by_head(keys.index_select(0, context.slots), context.num_keys),
            self._by_head(values.index_select(0, context.slots), context.num_keys),
            attn_mask=context.mask,
            is_causal=context.is_causal,
            scale=scale,
            enable_gqa=self._spec.num_heads != self._spec.num_kv_heads,
        )
        output.index_copy_(0, self._query_index, attended.transpose(1, 2).flatten(0, 1))

    def _by_head(self, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """``[num_rows * num_tokens, heads, size]`` → ``[num_rows, heads, num_tokens, size]``."""
        return tokens.view(self._num_rows, num_tokens, *tokens.shape[1:]).transpose(1, 2)

    def _context(self, window: int | None) -> _Context:
        if window is not None and window >= self._max_seq_len:
            window = None
        if window not in self._contexts:
            self._contexts[window] = self._make_context(window)
        return self._contexts[window]

    def _make_context(self, window: int | None) -> _Context:
        seq_lens = self._seq_lens[:, None]
        num_keys = self._max_seq_len
        first = torch.zeros_like(seq_lens)
        if window is not None:
            # The oldest query sees furthest back; what lies before that is not gathered at all.
            first = (seq_lens - self._query_lens[:, None] - window + 1).clamp_(min=0)
            num_keys = min(num_keys, window + self._num_queries - 1)
        positions = first + torch.arange(num_keys, device=self._spec.device)
        mask, is_causal = self._mask(positions, window)
        return _Context(
            slots=self._slots_of(positions), num_keys=num_keys, mask=mask, is_causal=is_causal
        )

    def _slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of ``[num_rows, num_keys]`` positions; those past the context become slot 0."""
        block_size = self._spec.block_size
        exists = positions < self._seq_lens[:, None]
        columns = torch.where(exists, positions // block_size, 0)
        block_ids = self._block_table.gather(1, columns).long()
        slots = block_ids * block_size + positions % block_size
        return torch.where(exists, slots, 0).flatten()

    def _mask(
        self, positions: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor | None, bool]:
        """The additive mask for keys at ``positions``, or what stands for it."""
        if self._num_rows == 1 and positions.shape[1] == self._max_seq_len and window is None:
            if self._num_queries == 1:
                return None, False
            if self._num_queries == self._max_seq_len:
                return None, True
        keys = positions[:, None, :]
        queries = self._query_positions[:, :, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._spec.dtype, device=self._spec.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None], False
