"""Shape and size of the paged KV cache. Knows nothing of who owns a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.models.base import ModelConfig

LAYOUT = "NHD"
"""Order inside a block: token, head, element; part of ``kv_fp``."""


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """What decides the cache's shape.

    Attributes:
        num_layers: Layers with a cache of their own.
        num_kv_heads: Key (and value) heads of a layer.
        head_size: Elements of one head.
        block_size: Tokens of one block.
        dtype: Of the cached keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> KvCacheSpec:
        """The cache that a model needs."""
        return cls(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            block_size=block_size,
            dtype=dtype,
        )

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = 2 * self.block_size * self.num_kv_heads * self.head_size
        return self.num_layers * elements * int(self.dtype.itemsize)

    def num_blocks_in(self, size_bytes: int) -> int:
        """Whole blocks that fit ``size_bytes``, the null block included."""
        return size_bytes // self.block_size_bytes

    def layer_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's tensor: keys then values, block, token, head, element."""
        return (2, num_blocks, self.block_size, self.num_kv_heads, self.head_size)
