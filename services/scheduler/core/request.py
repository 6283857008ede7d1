"""One choice of one request inside one engine: what it is, how far it is, and the states it may be in.

Knows neither blocks' contents nor sessions; the scheduler core is the only writer once it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

from services.common.errors import InvariantError
from services.common.sampling import SamplingParams


class RequestStatus(Enum):
    """Where a request is in its life; ``TRANSITIONS`` says what may follow what."""

    WAITING = auto()
    WAITING_FOR_PREPARE = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {RequestStatus.WAITING_FOR_PREPARE, RequestStatus.RUNNING, RequestStatus.FINISHED}
    ),
    RequestStatus.WAITING_FOR_PREPARE: frozenset({RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One choice, from ``Scheduler.add`` to its one finish.

    Times are seconds on the caller's clock (any that never runs backwards); only the caller knows what
    zero means. Three counts tell how far the request is::

        0 <= num_computed_tokens <= num_planned_tokens,  num_tokens <= num_planned_tokens

    where ``num_planned_tokens - num_tokens`` output tokens are in flight: sampled by steps whose results
    have not been applied (placeholders). ``num_computed_tokens`` advances when a step is planned.

    Attributes:
        handle: Names the row on the Attach stream; chosen by the caller, never reused.
        request_id: For logs.
        choice: Index of the choice in its request; part of the sampling key.
        prompt_ids: The prompt; not empty.
        resume_ids: Output tokens that an earlier attempt has already delivered: history, not sent again.
        sampling: Valid (``SamplingParams.validate`` has passed).
        root_key: Parent of the first block's key (``block_hash.root_key``); its namespace isolates.
        arrival_s: When the request arrived; kept when it moves to another engine.
        priority: Lower runs earlier; not 0 only under the priority policy.
        deadline_s: When it ends with ``DeadlineExceeded`` if it is not running by then.
        attempt: Counter of submissions, for ``Life``.
        crashes: Engines that died while it was in flight; from 2 on it runs alone.
        grammar_ref: The prepared grammar on the worker; 0 = none.
        needs_prepare: It is set aside until ``Scheduler.prepared``.
        prompt_logprobs_done: Prompt log-probabilities, if asked for, have been delivered before.
    """

    handle: int
    request_id: str
    choice: int = 0
    prompt_ids: InitVar[Sequence[int]]
    resume_ids: InitVar[Sequence[int]] = ()
    sampling: SamplingParams
    root_key: bytes
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    attempt: int = 0
    crashes: int = 0
    grammar_ref: int = 0
    needs_prepare: bool = False
    prompt_logprobs_done: bool = False

    token_ids: list[int] = field(init=False, repr=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)

    def __post_init__(self, prompt_ids: Sequence[int], resume_ids: Sequence[int]) -> None:
        self.token_ids = [*prompt_ids, *resume_ids]
        self.num_prompt_tokens = len(prompt_ids)
        self.num_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far, resumed ones included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The output tokens known so far (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    def become(self, status: RequestStatus) -> None:
        """Change state.

        Raises:
            InvariantError: ``TRANSITIONS`` does not allow it.
        """
        if status not in TRANSITIONS[self.status]:
            raise InvariantError(
                f"request {self.handle} cannot go from {self.status.name} to {status.name}"
            )
        self.status = status
