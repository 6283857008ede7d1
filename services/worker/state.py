"""What the worker knows of itself and shows to others; changed on the I/O loop only."""

from __future__ import annotations

import asyncio

from services.worker.runner.build import Progress, RunnerFacts


class WorkerState:
    """Loading progress, then facts; the attachment of the moment.

    Attributes:
        facts: What was discovered; ``None`` while loading.
        loaded: Set together with ``facts``.
        address: "host:port" under which others reach this worker.
        engine_id: Of the current attachment, or of the last one.
        scheduler_address: Of the current attachment; "" without one.
        is_draining: The worker is about to leave.
        changed: Set by every change; whoever watches clears it.
    """

    def __init__(self) -> None:
        # Written by the executor's thread, whole values only.
        self.progress = Progress("start")
        self.facts: RunnerFacts | None = None
        self.loaded = asyncio.Event()
        self.address = ""
        self.engine_id = 0
        self.scheduler_address = ""
        self.is_draining = False
        self.changed = asyncio.Event()
        self._is_stalled = False
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Attached, and the scheduler was told that it may send steps."""
        return self._is_ready

    @is_ready.setter
    def is_ready(self, value: bool) -> None:
        self._is_ready = value
        self.changed.set()

    @property
    def is_stalled(self) -> bool:
        """A step has been running for far too long."""
        return self._is_stalled

    @is_stalled.setter
    def is_stalled(self, value: bool) -> None:
        self._is_stalled = value
        self.changed.set()

    def on_loaded(self, facts: RunnerFacts) -> None:
        """Loading is done."""
        self.facts = facts
        self.loaded.set()
        self.changed.set()
