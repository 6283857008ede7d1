"""One choice of one request inside one engine: what it is, how far it is, and the states it may be
in.

Knows neither blocks' contents nor sessions; the scheduler core is the only writer once it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from services.common.errors import InvariantError
from services.common.sampling import SamplingParams

if TYPE_CHECKING:
    from services.scheduler.core.fork_group import ForkGroup

# A request that never reaches the next block to key (prefix caching off).
NEVER = 1 << 62
CRASHES_TO_RUN_ALONE = 2


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


def life_id(handle: int, generation: int) -> int:
    """Names one life of a row, from its admission to its end or preemption; fits 64 bits."""
    return handle << 24 | generation


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One choice, from ``Scheduler.add`` to its one finish.

    Times are seconds on the caller's clock (any that never runs backwards); only the caller knows
    what zero means. Three counts tell how far the request is::

        0 <= num_computed_tokens <= num_planned_tokens,  num_tokens <= num_planned_tokens

    where ``num_planned_tokens - num_tokens`` output tokens are in flight: sampled by steps whose
    results have not been applied (placeholders). ``num_computed_tokens`` advances when a step is
    planned.

    Attributes:
        handle: Names the row on the Attach stream; chosen by the caller, never reused.
        request_id: For logs.
        choice: Index of the choice in its request; part of the sampling key.
        prompt_ids: The prompt; not empty.
        resume_ids: Output tokens that an earlier attempt has already delivered: history, not sent
            again.
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
        pools: Not tokens are wanted but one vector, made of the states of all prompt tokens. The
            vector stands where the first output token would: it is planned and in flight like one.
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
    pools: bool = False

    # Tokens: prompt, then output. `generation` moves when the row dies: later results are dropped.
    token_ids: list[int] = field(init=False, repr=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_planned_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    generation: int = field(init=False, default=0)
    fork_group: ForkGroup | None = field(init=False, default=None, repr=False)
    prompt_logprob_chunks: list[object] = field(init=False, default_factory=list, repr=False)
    pooled: bytes = field(init=False, default=b"", repr=False)

    # Set by `Scheduler.add` for its engine.
    rank: tuple[float, int] = field(init=False, default=(0.0, 0))
    max_total_tokens: int = field(init=False, default=0)
    eos_ids: frozenset[int] = field(init=False, default=frozenset(), repr=False)
    end_ids: frozenset[int] = field(init=False, default=frozenset(), repr=False)

    # Blocks; written by the KVCacheManager alone.
    block_ids: list[int] = field(init=False, default_factory=list, repr=False)
    num_slots: int = field(init=False, default=0)
    block_keys: list[bytes] = field(init=False, default_factory=list, repr=False)
    block_keys_of: tuple[bytes, int] | None = field(init=False, default=None, repr=False)
    num_keyed_blocks: int = field(init=False, default=0)
    next_key_at: int = field(init=False, default=NEVER)

    # Counts and times for Usage and Life.
    num_cached_tokens: int | None = field(init=False, default=None)
    num_uncached_tokens: int = field(init=False, default=0)
    num_scheduled_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    first_scheduled_s: float | None = field(init=False, default=None)
    first_token_s: float | None = field(init=False, default=None)
    last_token_s: float | None = field(init=False, default=None)

    def __post_init__(self, prompt_ids: Sequence[int], resume_ids: Sequence[int]) -> None:
        self.token_ids = [*prompt_ids, *resume_ids]
        self.num_prompt_tokens = len(prompt_ids)
        self.num_tokens = self.num_planned_tokens = len(self.token_ids)
        self.num_uncached_tokens = self.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far, resumed ones included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The output tokens known so far (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_follower(self) -> bool:
        """Whether it waits for another choice to compute the prompt."""
        return self.fork_group is not None and self.fork_group.leader is not self

    @property
    def is_queued(self) -> bool:
        """Whether it stands in the waiting queue."""
        return self.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and (
            not self.is_follower
        )

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks will do: they hold KV, but neither logits nor states."""
        needs_logits = self.sampling.prompt_logprobs is not None and not self.prompt_logprobs_done
        return not (needs_logits or self.pools)

    @property
    def runs_alone(self) -> bool:
        """Whether it is suspected of killing engines: nobody may share a step with it."""
        return self.crashes >= CRASHES_TO_RUN_ALONE

    @property
    def may_have_ended(self) -> bool:
        """A cheap test that is true whenever ``stop.find_stop`` finds something."""
        return (
            self.token_ids[-1] in self.end_ids
            or self.num_tokens >= self.max_total_tokens
            or self.sampling.repetition_detection is not None
        )

    def append_token(self, token_id: int, *, now: float) -> None:
        """A planned token's value is known."""
        self.token_ids.append(token_id)
        self.num_tokens += 1
        self.prompt_logprobs_done = True
        self.last_token_s = now
        if self.first_token_s is None:
            self.first_token_s = now

    def take_chunks(self) -> list[object]:
        """The prompt's log-probability chunks, once."""
        chunks, self.prompt_logprob_chunks = self.prompt_logprob_chunks, []
        return chunks

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

    def drop_row(self) -> None:
        """The row on the worker ends: forget what was computed and what is in flight.

        Tokens that are known stay; results that still come belong to an older generation.
        """
        self.generation += 1
        self.num_computed_tokens = 0
        self.num_planned_tokens = self.num_uncached_tokens = self.num_tokens
        self.prompt_logprob_chunks.clear()

    def leave_engine(self) -> None:
        """Become as before ``Scheduler.add``; tokens, counts and times are kept."""
        self.drop_row()
        self.status = RequestStatus.WAITING
        self.fork_group = None
        self.block_ids = []
        self.num_slots = self.num_keyed_blocks = 0
