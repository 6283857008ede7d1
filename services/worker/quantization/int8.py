"""8 bits a weight and a float16 scale per group of 32: symmetric, ggml's Q8_0; 8.5 bits in all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.quantization.base import GROUP_SIZE, groups_of

_MAX = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """``weight[row, i] = scales[row, i // GROUP_SIZE] * values[row, i]``.

    Attributes:
        values: ``[out_size, in_size]`` int8, -127 to 127.
        scales: ``[out_size, num_groups]`` float16.
    """

    values: torch.Tensor
    scales: torch.Tensor

    native_create = "sl_linear_create_int8"

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def native_arrays(self) -> tuple[torch.Tensor, ...]:
        """See ``QuantizedWeight``."""
        return self.values, self.scales

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """See ``QuantizedWeight``."""
        scales = self.scales.float().repeat_interleave(GROUP_SIZE, dim=1)
        return (self.values * scales[:, : self.shape[1]]).to(dtype)

    def rows(self, ids: torch.Tensor) -> Int8Weight:
        """See ``QuantizedWeight``."""
        return Int8Weight(self.values[ids], self.scales[ids])

    def above(self, other: Int8Weight) -> Int8Weight:
        """See ``QuantizedWeight``."""
        return Int8Weight(
            torch.cat((self.values, other.values)), torch.cat((self.scales, other.scales))
        )


def quantize(weight: torch.Tensor) -> Int8Weight:
    """Round each weight to the nearest multiple of its group's scale, the largest to 127 of it."""
    in_size = weight.shape[1]
    values, scales = [], []
    for groups in groups_of(weight):
        scale = (groups.abs().amax(2) / _MAX).half()
        # Where float16 rounds the scale to nothing, so are the weights.
        divisor = scale.float().masked_fill(scale == 0, torch.inf)
        rounded = (groups / divisor[..., None]).round_().clamp_(-_MAX, _MAX)
        values.append(rounded.to(torch.int8).flatten(1)[:, :in_size])
        scales.append(scale)
    return Int8Weight(torch.cat(values), torch.cat(scales))


quantize_table = quantize
