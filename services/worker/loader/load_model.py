"""From a Hugging Face directory to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.fingerprint import eos_token_ids
from services.common.plugins import load_plugin
from services.common.telemetry import get_logger
from services.worker.attention._auto import resolve_backend
from services.worker.attention.base import AttentionBackend, AttentionSpec
from services.worker.layers.linear_kernel import linear_kernel_name
from services.worker.loader.checkpoint import Checkpoint
from services.worker.loader.dtype import named_dtype, resolve_dtype
from services.worker.loader.weights import fill_slots
from services.worker.models.base import CausalLM, HfConfig, ModelConfig
from services.worker.native.library import Library
from services.worker.quantization.base import QuantizationMethod

_MODELS = "services.worker.models"
_ATTENTION = "services.worker.attention"
_QUANTIZATION = "services.worker.quantization"

_MEANINGLESS_KEYS = frozenset(
    (
        "_model_name_or_path",
        "_name_or_path",
        "attention_dropout",
        "attn_implementation",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "max_window_layers",
        "pad_token_id",
        "pretraining_tp",
        "rope_interleaved",
        "sliding_window",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "use_sliding_window",
    )
)
"""Keys of config.json that change nothing here: of training, padding, or a feature left off."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are in place.

    Attributes:
        model: Ready for ``forward``.
        config: Its numbers.
        attention: The backend; ``begin_step(batch)`` once a step.
        dtype: Of weights, activations and KV cache.
        eos_token_ids: Ids that end a generation, ascending.
        library: Native CPU kernels that it uses; ``None`` = torch computes all.
    """

    model: CausalLM
    config: ModelConfig
    attention: AttentionBackend
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    library: Library | None


def load_model(
    model_dir: Path,
    *,
    dtype: str,
    device: torch.device,
    attention_backend: str,
    block_size: int,
    report: Callable[[int, int], None],
    library: Library | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Build the model that ``model_dir`` describes and stream its weights into it.

    Args:
        model_dir: Holds config.json and safetensors, one file or shards.
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
        device: Where it shall run.
        attention_backend: Name of a file in ``services/worker/attention``, or "auto".
        block_size: Tokens of one KV block.
        report: Called with (bytes loaded, bytes in all) as loading goes on.
        library: Native CPU kernels; ``None`` = torch computes all.
        quantization: Name of a file in ``services/worker/quantization``; ``None`` = weights in
            ``dtype``.

    Raises:
        ConfigError: The directory, family, dtype or a feature of the model is not supported, or a
            tensor is missing, unexpected or of the wrong shape; the message names it.
    """
    raw = HfConfig.load(model_dir / "config.json")
    family = load_plugin(_MODELS, raw.text("model_type"), what="model_type")
    config: ModelConfig = family.read_config(raw)
    checkpoint = Checkpoint.open(model_dir)
    torch_dtype = resolve_dtype(dtype, checkpoint=_stored_dtype(raw, checkpoint), device=device)
    _warn_of_unread(raw)
    spec = AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        block_size=block_size,
        dtype=torch_dtype,
        device=device,
        library=library,
    )
    backend = resolve_backend(attention_backend, spec)
    attention: AttentionBackend = load_plugin(_ATTENTION, backend, what="attention backend").build(
        spec
    )
    model: CausalLM = family.build(config, dtype=torch_dtype, device=device)
    if quantization is not None:
        model.quantize(quantization_method(quantization))
    fill_slots(
        model.weight_slots(), checkpoint, is_head_tied=config.tie_word_embeddings, report=report
    )
    model.finish_loading(library)
    log.info(
        "model_loaded",
        model_type=config.model_type,
        dtype=str(torch_dtype),
        size_bytes=checkpoint.size_bytes,
        attention_backend=backend,
        quantization=quantization,
        linear_kernel=linear_kernel_name(
            torch_dtype, device, library=library, is_quantized=quantization is not None
        ),
    )
    return LoadedModel(
        model=model,
        config=config,
        attention=attention,
        dtype=torch_dtype,
        eos_token_ids=eos_token_ids(model_dir),
        library=library,
    )


def quantization_method(name: str) -> QuantizationMethod:
    """A way to keep weights in few bits.

    Raises:
        ConfigError: There is none of that name; the message lists those that exist.
    """
    method: QuantizationMethod = load_plugin(_QUANTIZATION, name, what="quantization")
    return method


def weight_dtype(model_dir: Path, *, dtype: str, device: torch.device) -> torch.dtype:
    """The dtype that ``load_model`` would give the model, without loading it.

    Args:
        model_dir: As ``load_model``.
        dtype: As ``load_model``.
        device: As ``load_model``.

    Raises:
        ConfigError: As ``load_model``.
    """
    stored = _stored_dtype(HfConfig.load(model_dir / "config.json"), Checkpoint.open(model_dir))
    return resolve_dtype(dtype, checkpoint=stored, device=device)


def _stored_dtype(raw: HfConfig, checkpoint: Checkpoint) -> torch.dtype:
    """What config.json names (``torch_dtype`` before transformers 5), else the tensors' own."""
    name = raw.text("dtype", raw.text("torch_dtype", ""))
    return named_dtype(name) if name else checkpoint.dtype


def _warn_of_unread(raw: HfConfig) -> None:
    keys = [key for key in raw.unread if key not in _MEANINGLESS_KEYS]
    if keys:
        log.warning("config_keys_ignored", keys=keys)
