"""Copies a checkpoint's tensors into the model's parameters, each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from services.common.errors import ConfigError
from services.worker.loader.checkpoint import Checkpoint
from services.worker.quantization.base import QuantizedSlot

_NAMES_SHOWN = 5
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies, which follow from config.json."""


def fill_slots(
    slots: Mapping[str, torch.Tensor | QuantizedSlot],
    checkpoint: Checkpoint,
    *,
    is_head_tied: bool,
    report: Callable[[int, int], None],
) -> None:
    """Stream all tensors into their slots, converting dtypes on the way.

    Nothing is held but the mapped file and the slots themselves.

    Args:
        slots: Checkpoint name → parameter (or view of one) to fill in place.
        checkpoint: Where the tensors are.
        is_head_tied: The output head is the embedding: a head of its own is not wanted.
        report: Called with (bytes read, bytes in all).

    Raises:
        ConfigError: A tensor is missing, unexpected, or of the wrong shape; nothing is copied
            unless all names fit.
    """
    wanted = _wanted_names(checkpoint.names, is_head_tied=is_head_tied)
    _check_names(wanted, slots)
    total = checkpoint.size_bytes
    done = 0
    report(done, total)
    for name, tensor in checkpoint.tensors():
        if name in wanted:
            _fill(name, slots[name], tensor)
        done += tensor.nbytes
        report(done, total)
    report(total, total)


def _wanted_names(names: Iterable[str], *, is_head_tied: bool) -> set[str]:
    wanted = {name for name in names if not name.endswith(_COMPUTED_SUFFIX)}
    if is_head_tied:
        wanted.discard("lm_head.weight")
    return wanted


def _check_names(names: set[str], slots: Mapping[str, torch.Tensor | QuantizedSlot]) -> None:
    problems = []
    if missing := sorted(slots.keys() - names):
        problems.append(f"missing: {_shown(missing)}")
    if unexpected := sorted(names - slots.keys()):
        problems.append(f"unexpected: {_shown(unexpected)}")
    if problems:
        raise ConfigError(f"the checkpoint does not fit the model; {'; '.join(problems)}")


def _fill(name: str, slot: torch.Tensor | QuantizedSlot, tensor: torch.Tensor) -> None:
    if slot.shape != tensor.shape:
        raise ConfigError(
            f"tensor {name!r} has shape {list(tensor.shape)}, the model wants {list(slot.shape)}"
        )
    slot.copy_(tensor)


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
