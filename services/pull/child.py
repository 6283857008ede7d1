"""Runs a command that prints its progress."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.config import child_environment

_TAIL_LINES = 12
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Finished:
    """How a child ended.

    Attributes:
        code: Its exit code.
        tail: Its last lines, standard output and error together.
    """

    code: int
    tail: str


def run_child(command: Sequence[str], *, on_line: Callable[[str], None]) -> Finished:
    """Run a command to its end.

    Args:
        command: Program and arguments; paths in it must be absolute.
        on_line: Called with each line that it prints.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command,
        cwd=_ROOT,  # `-m` looks here first: our own package, installed or not
        # Spinning OpenMP waits cost minutes where the cores are shared.
        env=child_environment({"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            on_line(line.strip())
    return Finished(process.returncode, "\n".join(tail))
