"""Who this worker is: its label, its fingerprints, and a new engine id for every attachment."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from services.common.block_hash import directory_revision, frame
from services.common.fingerprint import text_fingerprint

_RANDOM_BITS = 20
_NUM_RANKS = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while the process lives.

    Attributes:
        worker_id: A label for people.
        model: Name under which the model is served.
        revision: Of the weights.
        text_fp: What text and tokens mean here.
        kv_fp: What a KV block means here; equal engines may exchange blocks.
    """

    worker_id: str
    model: str
    revision: str
    text_fp: str
    kv_fp: str


def identify(
    model_dir: Path,
    *,
    worker_id: str | None,
    model: str,
    dtype: str,
    quantization: str | None,
    layout: str,
) -> Identity:
    """Read the model directory's fingerprints.

    Args:
        model_dir: Of the model.
        worker_id: ``None`` = make one that no other process has.
        model: Name under which the model is served.
        dtype: Of weights and KV cache.
        quantization: How weights are kept instead; what is computed from them is another model's.
        layout: Of a KV block.

    Raises:
        ConfigError: A file is missing.
    """
    revision = directory_revision(model_dir)
    weight_dtype = dtype if quantization is None else f"{quantization} as {dtype}"
    return Identity(
        worker_id=worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}",
        model=model,
        revision=revision,
        text_fp=text_fingerprint(model_dir),
        kv_fp=kv_fingerprint(revision, weight_dtype=weight_dtype, kv_dtype=dtype, layout=layout),
    )


def kv_fingerprint(revision: str, *, weight_dtype: str, kv_dtype: str, layout: str) -> str:
    """SHA-256 (hex) of everything that decides the content of a KV block."""
    fields = frame(revision, weight_dtype, kv_dtype, layout, str(_NUM_RANKS))
    return hashlib.sha256(fields).hexdigest()


def new_engine_id(*, after: int = 0) -> int:
    """An id that names one attachment: milliseconds since 1970, then 20 random bits.

    Args:
        after: The id before; the new one is larger even if the clock was set back.
    """
    engine_id = int(time.time() * 1000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    return max(engine_id, after + 1)
