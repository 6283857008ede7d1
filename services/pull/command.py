"""The command line of a pull."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import SluicewayError
from services.pull.ensure import ensure_model
from services.pull.progress import Progress

EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Pull one model: progress to standard error, then its directory to standard output."""
    parser = argparse.ArgumentParser(prog="python -m services.pull", description="Fetch a model.")
    parser.add_argument("model", help="smollm2, a local directory, or a hub id")
    parser.add_argument("--cache-dir", type=Path, help="where models go [the user's cache]")
    options = parser.parse_args(argv)
    try:
        path = ensure_model(options.model, cache_dir=options.cache_dir, report=PhasePrinter())
    except SluicewayError as error:
        sys.stderr.write(f"pull: {error.message}\n")
        return EXIT_FAILED
    sys.stdout.write(f"{path}\n")
    return 0


class PhasePrinter:
    """Writes a line per phase and per tenth of it."""

    def __init__(self) -> None:
        self._last = ("", -1)

    def __call__(self, progress: Progress) -> None:
        """Show progress if it has moved enough."""
        step = (progress.phase, int(progress.fraction * 10))
        if step != self._last:
            self._last = step
            sys.stderr.write(f"pull: {_text(progress)}\n")


def _text(progress: Progress) -> str:
    if progress.total_bytes:
        done, total = progress.done_bytes / 1e6, progress.total_bytes / 1e6
        return f"{progress.phase} {done:.0f} of {total:.0f} MB"
    return f"{progress.phase} {progress.fraction * 100:.0f} %"
