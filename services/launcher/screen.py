"""What the user of ``sluiceway serve`` sees: lines, and below them one status line that changes.

On a terminal the status line is redrawn in place. Elsewhere (a pipe, a log file) it is printed as a
plain line, and only when its milestone is a new one.
"""

from __future__ import annotations

import json
import shutil
from typing import TextIO

_CLEAR_LINE = "\r\033[2K"


class Screen:
    """Writes to one stream; not thread-safe."""

    def __init__(self, out: TextIO, *, is_terminal: bool, as_json: bool = False) -> None:
        """
        Args:
            out: Where everything goes.
            is_terminal: Whether the status line may be redrawn in place, and colour used.
            as_json: Write every line as a JSON object, for machines.
        """
        self._out = out
        self.as_json = as_json
        self.is_terminal = is_terminal and not as_json
        self._status = ""
        self._milestone = ""

    def line(self, text: str = "") -> None:
        """Print a line that stays."""
        if not self.as_json:
            self.raw(text)
        elif text:
            self.raw(json.dumps({"child": "launcher", "event": text}, ensure_ascii=False))

    def raw(self, text: str) -> None:
        """Print a line that stays, as it is."""
        if self._status:
            self._out.write(_CLEAR_LINE)
        self._out.write(f"{text}\n{self._status}")
        self._out.flush()

    def status(self, text: str, *, milestone: str) -> None:
        """Replace the status line.

        Args:
            text: The new one; "" = none.
            milestone: Where there is no terminal, ``text`` is printed when this has changed.
        """
        if self.is_terminal:
            self._redraw(text)
        elif text and milestone != self._milestone:
            self.line(text)
        self._milestone = milestone

    def _redraw(self, text: str) -> None:
        if text == self._status:
            return
        width = shutil.get_terminal_size().columns
        self._status = text[: width - 1]
        self._out.write(_CLEAR_LINE + self._status)
        self._out.flush()


def bytes_text(num_bytes: float) -> str:
    """ "270 MB": a size for people."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
