"""The scheduler of one engine: what runs in the next step, and what a step's result means."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import SluicewayError
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.output import (
    AbortReason,
    Finished,
    KvEvents,
    LoadSnapshot,
    QueuePosition,
    StepOutcome,
    StepPlan,
    StepUpdate,
)
from services.scheduler.core.request import Request

__all__ = ["EngineLimits", "Scheduler"]


class Scheduler:
    """One engine's requests, blocks and steps. Pure: time comes in as ``now`` (seconds)."""

    def __init__(self, limits: EngineLimits) -> None:
        raise NotImplementedError

    def add(self, choices: Sequence[Request], *, now: float) -> None:
        """Accept all choices of one request (several for n > 1), or none.

        The first choice is computed first; the others fork its prompt's full blocks.
        A choice whose ``resume_ids`` already hold its end finishes at once (see ``take_finished``).

        Raises:
            ContextLengthExceeded: It can never fit the context or the pool.
            InvalidRequest: A token id is not in the vocabulary, or the prompt is empty.
            Overloaded: The waiting queue is full; ``retry_after_s`` says when to come back.
        """
        raise NotImplementedError

    def abort(self, handle: int, *, reason: AbortReason, kept_tokens: int | None, now: float) -> bool:
        """End a request at once; its finish is in ``take_finished``. Idempotent.

        Args:
            handle: The request.
            reason: STOP_STRING finishes as ``stop``, DEADLINE as ``error``, the rest as ``abort``.
            kept_tokens: Output tokens that the client keeps; None = all.
            now: The time.

        Returns:
            Whether the request was known (false: it has ended before).
        """
        raise NotImplementedError

    def prepared(self, handle: int, *, error: SluicewayError | None, now: float) -> None:
        """What a request waited for is ready, or has failed (then it ends ``error``).

        Call it for every choice that was added with ``needs_prepare``; unknown handles are ignored.
        """
        raise NotImplementedError

    def expire(self, *, now: float) -> None:
        """End waiting requests whose deadline or prepare time has passed (``schedule`` does it too)."""
        raise NotImplementedError

    def next_expiry(self) -> float | None:
        """When ``expire`` may next have something to do."""
        raise NotImplementedError

    def schedule(self, *, now: float) -> StepPlan | None:
        """Plan the next step; send it before calling anything else.

        Returns:
            None while ``pipeline_depth`` steps are in flight or nothing can run.
        """
        raise NotImplementedError

    def apply(self, outcome: StepOutcome, *, now: float) -> StepUpdate:
        """Take the result of the oldest step in flight.

        Raises:
            InvariantError: It is not the result of the oldest step in flight: the engine is out of
                order and must be given up.
        """
        raise NotImplementedError

    def take_finished(self) -> list[Finished]:
        """Finishes since the last ``apply`` or call of this; each request appears exactly once."""
        raise NotImplementedError

    def take_kv_events(self) -> KvEvents:
        """Keys that other engines may now count on, or no longer."""
        raise NotImplementedError

    def lose_engine(self) -> list[Request]:
        """The worker is gone: give back all unfinished requests, in order, to be added elsewhere.

        Those of the steps in flight have ``crashes`` raised. Choices of one request keep their order;
        add them together. This scheduler must not be used again.
        """
        raise NotImplementedError

    def withdraw(self, handle: int) -> Request | None:
        """Give back a waiting request that holds nothing here, to be added elsewhere."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        """Forget all keys; false (and nothing done) while a request holds blocks."""
        raise NotImplementedError

    def queue_position(self, handle: int, *, now: float) -> QueuePosition | None:
        """Where a waiting request stands; None if it is not waiting."""
        raise NotImplementedError

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a request (not yet added) that this engine's cache holds; changes nothing."""
        raise NotImplementedError

    def load(self, *, now: float) -> LoadSnapshot:
        """State and counters."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether a step is wanted: a request is unfinished, or the worker must be told of an end."""
        raise NotImplementedError

    @property
    def num_in_flight(self) -> int:
        """Steps sent whose results have not been applied."""
        raise NotImplementedError
