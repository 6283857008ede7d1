"""How far a pull is, as a value and as the line that a child prints for its parent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

_LINE_PREFIX = "sluiceway-progress "


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is.

    Attributes:
        phase: "wait" (another process pulls the same model), "download", "unpack" or "convert".
        fraction: 0..1 of the phase; 0 while unknown.
        done_bytes: Bytes so far; 0 where the phase has none.
        total_bytes: Bytes in all; 0 while unknown.
    """

    phase: str
    fraction: float = 0.0
    done_bytes: int = 0
    total_bytes: int = 0


Report = Callable[[Progress], None]


def bytes_progress(phase: str, done_bytes: int, total_bytes: int) -> Progress:
    """Progress of a phase that counts bytes."""
    fraction = min(done_bytes / total_bytes, 1.0) if total_bytes else 0.0
    return Progress(phase, fraction, done_bytes, total_bytes)


def to_line(progress: Progress) -> str:
    """What a child prints."""
    values = [progress.phase, progress.fraction, progress.done_bytes, progress.total_bytes]
    return _LINE_PREFIX + json.dumps(values)


def from_line(line: str) -> Progress | None:
    """What a child's line says; ``None`` if it is no progress line."""
    if not line.startswith(_LINE_PREFIX):
        return None
    return Progress(*json.loads(line.removeprefix(_LINE_PREFIX)))
