"""Runs the model pull as a child and shows its progress."""

from __future__ import annotations

import asyncio
import re
import signal
import sys

from services.common.errors import ConfigError
from services.launcher.child import Child, exit_text
from services.launcher.plan import ChildSpec
from services.launcher.screen import Screen
from services.pull.find import find_model

_PREFIX = "pull: "
_PROGRESS = re.compile(rf"{_PREFIX}(\w+ .*(?:%|MB))")


class Pull:
    """One run of ``python -m services.pull MODEL``, unless the model is there already."""

    def __init__(self, model: str, *, screen: Screen) -> None:
        """
        Args:
            model: ``smollm2``, a directory, or a hub id.
            screen: Where its progress is shown.
        """
        argv = (sys.executable, "-m", "services.pull", model)
        self._child = Child(ChildSpec("pull", "pull", argv, {}, ""), on_line=self._show)
        self._model = model
        self._screen = screen
        self._is_stopped = False

    def stop(self) -> None:
        """End it at once; half a model leaves no trace."""
        self._is_stopped = True
        self._child.signal(signal.SIGKILL)

    async def run(self) -> str:
        """Pull.

        Returns:
            The directory of the model.

        Raises:
            ConfigError: It failed; the message is what the child said.
            asyncio.CancelledError: It was stopped.
        """
        found = find_model(self._model)
        if found is not None:
            return str(found)
        await self._child.start()
        code = await self._child.wait()
        self._screen.status("", milestone="pulled")
        if self._is_stopped:
            raise asyncio.CancelledError
        lines = list(self._child.last_lines)
        if code != 0 or not lines:
            said = "\n".join(line.removeprefix(_PREFIX) for line in lines) or exit_text(code)
            raise ConfigError(f"cannot pull {self._model}:\n{said}")
        return lines[-1]

    def _show(self, _child: Child, line: str) -> None:
        found = _PROGRESS.fullmatch(line)
        if found:
            self._screen.status(f"{self._model}: {found[1]}", milestone=line)
