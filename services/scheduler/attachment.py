"""A worker from its Hello to the end of its stream, and where its engine stands in that time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from services.common.errors import InvalidRequest, SluicewayError
from services.scheduler.engine import Engine, EngineLink
from services.scheduler.lives import EngineEvent, EngineState, Life, engine_life
from services.scheduler.worker_profile import LoadingProgress, WorkerIdentity


class WorkerStream(EngineLink, Protocol):
    """The stream of an attached worker; nothing here waits."""

    def drain(self) -> None:
        """Nothing more will be sent: the worker may leave."""

    def close(self, error: SluicewayError | None = None) -> None:
        """End the stream; ``None`` = well."""


@dataclass(slots=True, eq=False)
class Attachment:
    """One attachment of one worker.

    Attributes:
        identity: Who attached.
        stream: The way to the worker.
        life: Where the engine stands.
        loading: What the worker is at until it is ready.
        engine: What runs requests, once the worker is ready.
        runner: The task that runs ``engine``.
        is_drain_sent: The worker was told that it may leave.
    """

    identity: WorkerIdentity
    stream: WorkerStream
    life: Life[EngineState, EngineEvent] = field(default_factory=engine_life)
    loading: LoadingProgress | None = None
    engine: Engine | None = None
    runner: asyncio.Task[None] | None = None
    is_drain_sent: bool = False

    @property
    def engine_id(self) -> int:
        """Names this attachment."""
        return self.identity.engine_id

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        return self.life.state

    @property
    def is_ready(self) -> bool:
        """Whether new requests may be placed here."""
        return self.life.state is EngineState.READY

    @property
    def is_loading(self) -> bool:
        """Whether the worker has not been ready yet."""
        return self.engine is None

    def running_engine(self) -> Engine:
        """The engine.

        Raises:
            InvalidRequest: The worker has not said that it is ready.
        """
        if self.engine is None:
            raise InvalidRequest(f"worker {self.identity.worker_id} is not ready yet")
        return self.engine
