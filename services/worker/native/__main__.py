"""``python -m services.worker.native``: builds every level now, for an image."""

from __future__ import annotations

import platform

from services.common.config import user_cache_dir
from services.worker.native.build import build
from services.worker.native.isa import LEVELS


def main() -> None:
    """Build into the user's cache directory; what is there already is left."""
    num_levels = len(LEVELS) if platform.machine() == "x86_64" else 1
    for level in range(num_levels):
        build(level, cache_dir=user_cache_dir() / "native")


if __name__ == "__main__":
    main()
