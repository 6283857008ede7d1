"""Which backend "auto" means. Pure."""

from __future__ import annotations

from services.worker.attention.base import AttentionSpec
from services.worker.attention.native_cpu import DTYPES

AUTO = "auto"


def resolve_backend(name: str, spec: AttentionSpec) -> str:
    """The file that a setting names.

    Args:
        name: Of a file, or "auto": the native library's where there is one that has the dtype, else
            the torch reference.
        spec: What the backend shall be built for.
    """
    if name != AUTO:
        return name
    return "native_cpu" if spec.library is not None and spec.dtype in DTYPES else "torch_sdpa"
