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
_NUM_FITS = 3
_ON_GRID = 0.1
"""Sum of the squares of a group's losses, in squared scales, up to which its weights lay on 16
values already and were only rounded since, say to bfloat16. Other weights lose 2.7 on average."""


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
    """Round each weight to the nearest of 16 values that fit its group best.

    At first these go from the group's least weight to its largest; then, some times over, the line
    through what its weights were rounded to is fitted to them (least squares) and they are rounded
    anew. What was best of these counts. A group that 4 bits once made keeps its values.
    """
    in_size = weight.shape[1]
    values, scales, leasts = [], [], []
    for groups in groups_of(weight):
        least = groups.amin(2).half()
        best = _Rounded(groups, ((groups.amax(2) - least.float()) / _MAX).half(), least)
        best.loss[best.loss < _ON_GRID * best.scale.float().square()] = 0.0
        fitted = best
        for _ in range(_NUM_FITS if best.loss.any() else 0):
            fitted = _Rounded(groups, *fitted.fit(groups))
            best.take_where_better(fitted)
        rows = best.values.to(torch.uint8).flatten(1)[:, :in_size]
        pairs = functional.pad(rows, (0, in_size % 2)).unflatten(1, (-1, 2))
        values.append(pairs[..., 0] | pairs[..., 1] << 4)
        scales.append(best.scale)
        leasts.append(best.least)
    return Int4Weight(torch.cat(values), torch.cat(scales), torch.cat(leasts), in_size)


class _Rounded:
    """Groups rounded to their 16 values.

    Attributes:
        scale: ``[num_rows, num_groups]`` float16; 0 = all values are ``least``.
        least: Likewise.
        values: ``[num_rows, num_groups, GROUP_SIZE]`` float32, 0 to 15.
        loss: ``[num_rows, num_groups]`` float32: sum of the squares of what is lost.
    """

    def __init__(self, groups: torch.Tensor, scale: torch.Tensor, least: torch.Tensor) -> None:
        self.scale, self.least = scale, least
        step, start = scale.float()[..., None], least.float()[..., None]
        rounded = (groups - start).div_(step.masked_fill(step == 0, torch.inf)).round_()
        self.values = rounded.clamp_(0, _MAX)
        self.loss = (self.values * step).add_(start).sub_(groups).square_().sum(2)

    def fit(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and least value of the line that fits ``values`` to the groups best."""
        mean_value, mean = self.values.mean(2), groups.mean(2)
        apart = self.values - mean_value[..., None]
        spread = apart.square().sum(2)
        scale = (apart * groups).sum(2) / spread.masked_fill(spread == 0, torch.inf)
        return scale.half(), (mean - scale * mean_value).half()

    def take_where_better(self, other: _Rounded) -> None:
        """Take the groups of another rounding that lose less."""
        is_better = other.loss < self.loss
        self.scale = torch.where(is_better, other.scale, self.scale)
        self.least = torch.where(is_better, other.least, self.least)
        self.values = torch.where(is_better[..., None], other.values, self.values)
        self.loss = torch.where(is_better, other.loss, self.loss)


quantize_table = int8.quantize
