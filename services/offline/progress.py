"""A line on standard error that tells how far a run is."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Draws over itself; the last one ends the line."""

    def __init__(self, total: int) -> None:
        """
        Args:
            total: Choices that will finish.
        """
        self._total = total
        self._started = time.monotonic()

    def show(self, done: int, num_tokens: int) -> None:
        """Draw it again.

        Args:
            done: Choices that have finished.
            num_tokens: Output tokens so far.
        """
        seconds = time.monotonic() - self._started
        rate = num_tokens / seconds if seconds else 0.0
        end = "\n" if done == self._total else ""
        sys.stderr.write(f"\r{done}/{self._total} choices, {rate:.0f} tokens/s{end}")
