"""Runs sequences through a loaded model step by step, over a block table with scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from services.worker.attention.base import AttentionBatch
from services.worker.kv_cache.allocation import allocate
from services.worker.kv_cache.spec import KvCacheSpec
from services.worker.loader.load_model import LoadedModel, load_model
from services.worker.native.isa import IsaSetting
from services.worker.native.library import load_library

CPU = torch.device("cpu")


class PagedForward:
    """A model, a cache, and sequences whose blocks are scattered over it.

    Args:
        loaded: The model.
        sequences: Token ids of each sequence.
        block_size: Tokens of one block.
        seed: Of the block ids' order.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        sequences: Sequence[Sequence[int]],
        *,
        block_size: int,
        seed: int = 0,
    ) -> None:
        self._loaded = loaded
        self._sequences = [list(sequence) for sequence in sequences]
        self._block_size = block_size
        self._computed = [0] * len(sequences)
        num_blocks = [-(-len(sequence) // block_size) for sequence in sequences]
        free = list(range(1, sum(num_blocks) + 1))
        random.Random(seed).shuffle(free)
        self._blocks = [[free.pop() for _ in range(num)] for num in num_blocks]
        spec = KvCacheSpec.of(loaded.config, block_size=block_size, dtype=loaded.dtype)
        self._kv_caches = allocate(spec, sum(num_blocks) + 1, device=CPU)

    def step(self, num_tokens: Sequence[int]) -> list[torch.Tensor]:
        """Run the next ``num_tokens[i]`` tokens of each sequence; 0 leaves it out.

        Returns:
            Each sequence's logits of this step, ``[num_tokens[i], vocab_size]`` float32.
        """
        rows = [row for row, num in enumerate(num_tokens) if num]
        spans = {
            row: range(self._computed[row], self._computed[row] + num_tokens[row]) for row in rows
        }
        positions = [position for row in rows for position in spans[row]]
        ids = [self._sequences[row][position] for row in rows for position in spans[row]]
        with torch.inference_mode():
            hidden = self._loaded.model.forward(
                torch.tensor(ids),
                torch.tensor(positions),
                kv_caches=self._kv_caches,
                attention=self._loaded.attention.begin_step(self._batch(rows, spans)),
            )
            logits = self._loaded.model.compute_logits(hidden).float()
        for row in rows:
            self._computed[row] = spans[row].stop
        return list(logits.split(list(num_tokens)))

    def put(self, row: int, position: int, token_id: int) -> None:
        """Set a token that has not been run yet."""
        self._sequences[row][position] = token_id

    def run(self, chunks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Run several steps; each sequence's logits of all its tokens, ``[length, vocab_size]``."""
        steps = [self.step(num_tokens) for num_tokens in chunks]
        return [torch.cat(parts) for parts in zip(*steps, strict=True)]

    def _batch(self, rows: Sequence[int], spans: dict[int, range]) -> AttentionBatch:
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(spans[row]))
        seq_lens = [spans[row].stop for row in rows]
        width = max(len(self._blocks[row]) for row in rows)
        table = [self._blocks[row] + [0] * (width - len(self._blocks[row])) for row in rows]
        slots = [self._slot(row, position) for row in rows for position in spans[row]]
        return AttentionBatch(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(table, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_start_loc_cpu=starts,
            seq_lens_cpu=seq_lens,
        )

    def _slot(self, row: int, position: int) -> int:
        block_id = self._blocks[row][position // self._block_size]
        return block_id * self._block_size + position % self._block_size


def load(
    model_dir: Path, *, dtype: str = "auto", block_size: int = 4, isa: IsaSetting = "off"
) -> LoadedModel:
    """Load a directory for the CPU: natively up to ``isa``, or all in torch."""
    return load_model(
        model_dir,
        dtype=dtype,
        device=CPU,
        attention_backend="auto",
        block_size=block_size,
        report=lambda done, total: None,
        library=load_library(isa),
    )
