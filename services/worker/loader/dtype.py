"""Which dtype a model runs in."""

from __future__ import annotations

import torch

from services.common.errors import ConfigError
from services.common.telemetry import get_logger

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

log = get_logger(__name__)


def resolve_dtype(wanted: str, *, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve the ``--dtype`` flag.

    Args:
        wanted: "auto", "bfloat16" or "float32".
        checkpoint: The dtype that the checkpoint is in.
        device: Where the model shall run.

    Returns:
        What was asked for; for "auto" the checkpoint's, but float32 for a float16 checkpoint on a
        CPU: CPUs compute float16 slowly or not at all, and bfloat16 would round the weights.

    Raises:
        ConfigError: The dtype is not supported.
    """
    if wanted != "auto":
        return named_dtype(wanted)
    if checkpoint not in _DTYPES.values():
        raise ConfigError(
            f"the checkpoint's dtype {checkpoint} is not supported; say --dtype bfloat16 or float32"
        )
    if checkpoint == torch.float16 and device.type == "cpu":
        log.warning(
            "float16_runs_as_float32",
            reason="CPUs do not compute float16; --dtype bfloat16 takes half the memory, rounded",
        )
        return torch.float32
    return checkpoint


def named_dtype(name: str) -> torch.dtype:
    """A dtype from its name in a flag or in config.json ("bfloat16", "torch.bfloat16").

    Raises:
        ConfigError: Not one that a model can run in; the message lists those.
    """
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype
