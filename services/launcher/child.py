"""One child process: started, listened to, signalled, buried."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import time
from collections import deque
from collections.abc import Callable

from services.common.config import child_environment
from services.launcher.plan import ChildSpec

NUM_LAST_LINES = 20
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20
_LAST_WORDS_S = 1.0

OnLine = Callable[["Child", str], None]


class Child:
    """A process that may live several times; ``start`` and ``wait`` alternate.

    Attributes:
        spec: What is started.
        last_lines: The end of its output, over all lives.
        started_at: Monotonic seconds of the last start.
    """

    def __init__(self, spec: ChildSpec, *, on_line: OnLine) -> None:
        """
        Args:
            spec: What to start.
            on_line: Called with every line of its output.
        """
        self.spec = spec
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.started_at = 0.0
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._output = -1

    @property
    def name(self) -> str:
        """For people."""
        return self.spec.name

    @property
    def pid(self) -> int:
        """Of the present or the last life; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Begin a life."""
        self.started_at = time.monotonic()
        # A pipe of our own: asyncio's keeps wait() from returning while a grandchild holds it open.
        self._output, theirs = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=asyncio.subprocess.STDOUT,
                env=child_environment(self.spec.environment),
                # Out of the terminal's group: Ctrl-C reaches the launcher alone, which drains in
                # order.
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    async def wait(self) -> int:
        """Read its output to the end of its life.

        Returns:
            The exit code; -9 = ended by signal 9.
        """
        process = self._process
        assert process is not None
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(self._output))
            code = await process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it has started ends with it
            await asyncio.wait((reader,), timeout=_LAST_WORDS_S)
            reader.cancel()
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs; SIGKILL reaches the processes that it has started as well."""
        if not self.is_alive:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    async def _read(self, descriptor: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), io.FileIO(descriptor)
        )
        try:
            await self._split(reader)
        finally:
            transport.close()

    async def _split(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await output.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line.decode(errors="replace").rstrip())
        self._take(rest.decode(errors="replace").rstrip())

    def _take(self, line: str) -> None:
        if not line:
            return
        self.last_lines.append(line)
        self._on_line(self, line)


def exit_text(code: int) -> str:
    """An exit code for people: "exit code 1", "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
