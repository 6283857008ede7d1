"""4 bits a weight, a float16 scale and a least weight per group of 32: ggml's Q4_1; 5 bits in all.

The output head, where an error goes to the logits undivided, and the embedding that may be the same
table keep 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from services.worker.quantization import int8
from services.worker.quantization.base import GROUP_SIZE, groups_of

_MAX = 15


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """``weight[row, i] = scales[row, g] * value[row, i] + leasts[row, g]``, g = i // GROUP_SIZE.

    Attributes:
        values: ``[out_size, ceil(in_size / 2)]`` uint8; two weights in a byte, 0 to 15 each, the
            first in the lower half.
        scales: ``[out_size, num_groups]`` float16.
        leasts: Likewise.
        in_size: Of the weight.
    """

    values: torch.Tensor
    scales: torch.Tensor
    leasts: torch.Tensor
    in_size: int

    native_create = "sl_linear_create_int4"

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.values.shape[0], self.in_size

    @property
    def native_arrays(self) -> tuple[torch.Tensor, ...]:
        """See ``QuantizedWeight``."""
        return self.values, self.scales, self.leasts

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """See ``QuantizedWeight``."""
        values = torch.stack((self.values & _MAX, self.values >> 4), dim=2).flatten(1)
        groups = functional.pad(values, (0, self.scales.shape[1] * GROUP_SIZE - values.shape[1]))
        groups = groups.unflatten(1, (-1, GROUP_SIZE))
        weight = groups * self.scales.float()[..., None] + self.leasts.float()[..., None]
        return weight.flatten(1)[:, : self.in_size].to(dtype)

    def rows(self, ids: torch.Tensor) -> Int4Weight:
        """See ``QuantizedWeight``."""
        return Int4Weight(self.values[ids], self.scales[ids], self.leasts[ids], self.in_size)

    def above(self, other: Int4Weight) -> Int4Weight:
        """See ``QuantizedWeight``."""
        return Int4Weight(
            torch.cat((self.values, other.values)),
            torch.cat((self.scales, other.scales)),
            torch.cat((self.leasts, other.leasts)),
            self.in_size,
        )


def quantize(weight: torch.Tensor) -> Int4Weight:
    """Round each weight to the nearest of 16 values, from its group's least to its largest."""
    in_size = weight.shape[1]
    values, scales, leasts = [], [], []
    for groups in groups_of(weight):
        least = groups.amin(2).half()
        scale = ((groups.amax(2) - least.float()) / _MAX).half()
        divisor = scale.float().masked_fill(scale == 0, torch.inf)
        rounded = (groups - least.float()[..., None]).div_(divisor[..., None]).round_()
        rows = rounded.clamp_(0, _MAX).to(torch.uint8).flatten(1)[:, :in_size]
        pairs = functional.pad(rows, (0, in_size % 2)).unflatten(1, (-1, 2))
        values.append(pairs[..., 0] | pairs[..., 1] << 4)
        scales.append(scale)
        leasts.append(least)
    return Int4Weight(torch.cat(values), torch.cat(scales), torch.cat(leasts), in_size)


quantize_table = int8.quantize
