"""What a scheduler says about one request, as plain values, and who wants to hear it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from services.common.errors import SluicewayError
from services.common.sampling import Constraint, SamplingParams


class FinishReason(Enum):
    """How a choice ended; the values are those of the wire."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class AbortReason(Enum):
    """Why the scheduler shall give up a choice; the values are those of the wire."""

    STOP_STRING = 1
    CLIENT_GONE = 2
    DEADLINE = 3
    SUPERSEDED = 4
    DRAIN = 5


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice; ``computed`` went through the model, ``wasted`` for nothing."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    wasted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice as its scheduler saw it.

    Attributes:
        stop_token_id: The stop token that ended it; ``None`` for EOS and everything else.
        stop_detail: What else ended it ("repetition_detected"), or "".
        error: Set if ``reason`` is ERROR.
        life: A serialised ``Life`` message, passed on unread.
        pooled: The vector of a request that pools, passed on unread; b"" = none.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    stop_detail: str = ""
    error: SluicewayError | None = None
    usage: Usage = Usage()
    life: bytes = b""
    pooled: bytes = b""


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of output tokens, column by column.

    Row i is about the token at index ``positions[i]`` of the token ids that it comes with;
    ``num_top[i]`` entries of the ``top_*`` columns belong to it, best first.
    """

    positions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    num_top: list[int] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def extend(self, later: Logprobs, *, shift: int) -> None:
        """Append the rows of ``later``, whose tokens follow ``shift`` tokens that are here."""
        self.positions += [position + shift for position in later.positions]
        self.logprobs += later.logprobs
        self.ranks += later.ranks
        self.num_top += later.num_top
        self.top_ids += later.top_ids
        self.top_logprobs += later.top_logprobs

    def first(self, num_tokens: int) -> Logprobs:
        """The rows of the first ``num_tokens`` tokens."""
        rows = sum(position < num_tokens for position in self.positions)
        tops = sum(self.num_top[:rows])
        return Logprobs(
            self.positions[:rows],
            self.logprobs[:rows],
            self.ranks[:rows],
            self.num_top[:rows],
            self.top_ids[:tops],
            self.top_logprobs[:tops],
        )


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from ``start`` on, column by column."""

    start: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    num_top: list[int]
    top_ids: list[int]
    top_logprobs: list[float]

    def extend(self, later: PromptLogprobs) -> None:
        """Append the rows that follow."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.ranks += later.ranks
        self.num_top += later.num_top
        self.top_ids += later.top_ids
        self.top_logprobs += later.top_logprobs


@dataclass(frozen=True, slots=True)
class Queued:
    """Where a request stands: ``position`` requests before it, ``eta_ms`` until it runs."""

    position: int
    eta_ms: int


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C trace context of a request."""

    traceparent: str
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What routing expects of the chosen scheduler: a hint for it."""

    engine_id: int
    cached_tokens: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class NewChoice:
    """One choice to be generated; ``resume_ids`` are output tokens of an earlier attempt."""

    index: int
    resume_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt of a request, as a scheduler is asked for it.

    Attributes:
        deadline_s: Seconds that are left; ``None`` = no deadline.
        prompt_logprobs_done: An earlier attempt has given the prompt's log-probabilities.
        pools: Not tokens are wanted but one vector of the prompt.
    """

    request_id: str
    attempt: int
    model: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    choices: Sequence[NewChoice]
    trace: Trace | None = None
    constraint: Constraint | None = None
    priority: int = 0
    tenant: str = ""
    cache_namespace: str = ""
    deadline_s: float | None = None
    prompt_logprobs_done: bool = False
    pools: bool = False
    prediction: Prediction | None = None


class TokenReceiver(Protocol):
    """Who has submitted a request. Called from the event loop; must not block.

    Per choice: any number of ``on_queued`` and ``on_tokens``, then exactly one end: an
    ``on_tokens`` with ``finished``, or ``on_lost``.
    """

    def on_queued(self, index: int, queued: Queued) -> None:
        """The choice is accepted, or has moved in the queue."""

    def on_tokens(
        self,
        index: int,
        token_ids: list[int],
        logprobs: Logprobs | None,
        finished: Finished | None,
    ) -> int | None:
        """The choice goes on by some tokens, ends, or both.

        Returns:
            How many of its output tokens are kept, if nothing more is wanted of the choice: it is
            then aborted in the scheduler (a stop string was found). Else ``None``.
        """

    def on_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Further rows, contiguous with those before."""

    def on_lost(self, index: int, error: SluicewayError) -> None:
        """The Session broke before the choice's end."""
