"""What goes into the core and what comes out of it: plans, results, finishes, events, loads.

Plain values; ``scheduler/convert.py`` maps them to messages and ``offline/convert.py`` to the
runner's values. Columns lie side by side, as on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.common.errors import SluicewayError
from services.common.sampling import SamplingParams


class FinishReason(Enum):
    """How a request ended; values as in ``common.proto``."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class AbortReason(Enum):
    """Why a client ends a request; values as in ``scheduler.proto``."""

    STOP_STRING = 1
    CLIENT_GONE = 2
    DEADLINE = 3
    SUPERSEDED = 4
    DRAIN = 5


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request as it is sent whole, once per admission; the values of the moment of planning."""

    handle: int
    choice: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    grammar_ref: int
    block_ids: tuple[int, ...]
    prompt_logprobs_done: bool
    pools: bool = False


@dataclass(slots=True)
class StepPlan:
    """One step to send. Row i is ``handles[i]``, new rows included, in the order they run.

    Attributes:
        step: Number of the step, from 1, without gaps.
        finished: Rows that end here.
        preempted: Rows that end here and may come back as new.
        new_rows: Requests sent whole; each is also in ``handles``.
        num_tokens: Tokens that row i computes.
        num_new_blocks: How many of ``new_block_ids`` row i's block table gains (0 for new rows).
        free_seq: The newest step whose result has been applied.
        num_prefill_tokens: Tokens of rows that compute more than the one last token.
        predicted_s: Expected device time, from steps measured so far; 0 = nothing measured yet.
    """

    step: int
    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)
    free_seq: int = 0
    total_num_tokens: int = 0
    num_prefill_tokens: int = 0
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the worker says about one step.

    Attributes:
        step: Results must be applied in the order of the steps.
        failed: Message of the exception that failed the whole step; the columns are then ignored.
        handles: Rows that ran (any order; unknown ones are dropped).
        num_sampled: Row i sampled this many of the flat ``token_ids``.
        prompt_logprobs: Chunks by handle, opaque here; given out once the prompt is complete.
        row_errors: Why rows failed alone, by handle.
        pooled: Vectors by handle, opaque here, of rows that pool and have computed their prompt.
        device_s: Time in forward and sampling.
        gap_s: From the end of the step before to the start of this one.
    """

    step: int
    handles: Sequence[int] = ()
    num_sampled: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    prompt_logprobs: Mapping[int, object] = field(default_factory=dict)
    row_errors: Mapping[int, SluicewayError] = field(default_factory=dict)
    pooled: Mapping[int, bytes] = field(default_factory=dict)
    failed: str | None = None
    device_s: float = 0.0
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice.

    ``computed`` went through the model, ``wasted`` of them were thrown away (recomputed after a
    preemption, sampled past the end, cut by a stop string).
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    wasted_tokens: int


@dataclass(frozen=True, slots=True)
class Life:
    """When things happened to one choice, on the caller's clock; None = did not happen."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float
    num_preemptions: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The one end of a request: its blocks are free.

    Attributes:
        stop_token_id: The id of ``stop_token_ids`` that ended it (None for an end-of-sequence
            token).
        stop_detail: "repetition_detected", or "".
        error: Set when ``reason`` is ERROR.
        pooled: The vector of a request that pools; b"" = none.
    """

    handle: int
    reason: FinishReason
    usage: Usage
    life: Life
    stop_token_id: int | None = None
    stop_detail: str = ""
    error: SluicewayError | None = None
    pooled: bytes = b""


@dataclass(slots=True)
class StepUpdate:
    """What to tell the clients after a result.

    Attributes:
        step: The step whose result was applied.
        handles: Requests that got tokens.
        offsets: Output tokens of the request before these (resumed ones counted).
        counts: Row i got this many of the flat ``token_ids``.
        source_starts: Index in ``StepOutcome.token_ids`` of row i's first token: side columns
            (log-probabilities) are found there.
        prompt_logprobs: (handle, chunk) in order, complete prompts only.
        finished: Requests that ended, here or since the last update.
    """

    step: int
    handles: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    source_starts: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, object]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Net change of the published keys since the last call: first ``cleared``, then the others."""

    stored: list[bytes]
    removed: list[bytes]
    cleared: bool

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.cleared)


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where a waiting request stands: how many start before it, and when it may start."""

    position: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """State and cumulative counters of one engine; fields as ``Load`` in ``common.proto``."""

    running: int
    waiting: int
    preemptions: int
    generated_tokens: int
    prompt_tokens: int
    prefix_queries: int
    prefix_hits: int
    finished_stop: int
    finished_length: int
    finished_abort: int
    finished_error: int
    waiting_uncached_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefill_tok_s: float
    decode_tok_s: float
    steps: int
