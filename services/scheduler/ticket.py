"""One choice of one attempt while this scheduler answers for it: from its Add to its one finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.scheduler.core.output import Finished, LoadSnapshot
from services.scheduler.core.request import Request
from services.scheduler.lives import HandleEvent, HandleState, Life, handle_life
from services.scheduler.submission import Submission


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a request went where it went; columns over the candidate engines."""

    engine_ids: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    costs_s: tuple[float, ...]
    chosen_engine_id: int
    wait_s: float


class Sink(Protocol):
    """Where results go; none of these waits. ``flush`` follows whatever was put in."""

    def queued(self, ticket: Ticket, *, position: int, eta_s: float | None) -> None:
        """The ticket waits; the first time this is its acceptance."""

    def tokens(
        self,
        ticket: Ticket,
        *,
        engine_id: int,
        step: int,
        offset: int,
        token_ids: Sequence[int],
        logprobs: object | None,
    ) -> None:
        """The ticket got tokens; ``offset`` output tokens came before them."""

    def prompt_logprobs(self, ticket: Ticket, *, engine_id: int, step: int, chunk: object) -> None:
        """Log-probabilities of some of the ticket's prompt."""

    def finished(self, ticket: Ticket, *, engine_id: int, step: int, finished: Finished) -> None:
        """The ticket has ended; nothing follows."""

    def flush(self, engine_id: int, load: LoadSnapshot | None) -> None:
        """What was put in for an engine may be written."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A choice on its way.

    Attributes:
        handle: The client's name for it.
        submission: What it belongs to.
        request: What the engine computes; its handle is the engine's, a new one after a move.
        sink: Who is told.
        decision: Why it is where it is; ``None`` until it is placed.
        life: Where it stands in its Session.
    """

    handle: int
    submission: Submission
    request: Request
    sink: Sink
    decision: Decision | None = None
    life: Life[HandleState, HandleEvent] = field(default_factory=handle_life)

    @property
    def has_ended(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self.life.state in (HandleState.FINISHED, HandleState.LOST)
