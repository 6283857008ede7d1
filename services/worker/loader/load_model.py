"""From a Hugging Face directory to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.attention.base import AttentionBackend
from services.worker.models.base import CausalLM, ModelConfig


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are in place.

    Attributes:
        model: Ready for ``forward``.
        config: Its numbers.
        attention: The backend; ``begin_step(batch)`` once a step.
        dtype: Of weights, activations and KV cache.
        eos_token_ids: Ids that end a generation, ascending.
    """

    model: CausalLM
    config: ModelConfig
    attention: AttentionBackend
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]


def load_model(
    model_dir: Path,
    *,
    dtype: str,
    device: torch.device,
    attention_backend: str,
    block_size: int,
    report: Callable[[int, int], None],
) -> LoadedModel:
    """Build the model that ``model_dir`` describes and stream its weights into it.

    Args:
        model_dir: Holds config.json and safetensors, one file or shards.
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
        device: Where it shall run.
        attention_backend: Name of a file in ``services/worker/attention``.
        block_size: Tokens of one KV block.
        report: Called with (bytes loaded, bytes in all) as loading goes on.

    Raises:
        ConfigError: The directory, family, dtype or a feature of the model is not supported, or a
            tensor is missing, unexpected or of the wrong shape; the message names it.
    """
    raise NotImplementedError
