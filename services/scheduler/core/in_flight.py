"""A step while it is planned, and what is remembered of it until its result comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.output import NewRow, StepPlan
from services.scheduler.core.request import Request


@dataclass(slots=True)
class InFlightStep:
    """The fence of a step: row i is the life ``generations[i]`` of ``requests[i]``.

    A result counts for a row only while the request's generation is still that one.

    Attributes:
        samples: Whether row i computes its last known token, and so yields a new one (or a vector).
        is_void: An earlier step has failed while this one was in flight: all its rows have been
            given up, and nothing that lives on builds on them. It may fail too, which means nothing
            then.
    """

    step: int
    handles: list[int]
    num_tokens: list[int]
    requests: list[Request] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_decode_rows: int = 0
    num_prefill_tokens: int = 0
    is_void: bool = False

    def live_requests(self) -> Iterator[Request]:
        """Requests that are still in the life that this step belongs to."""
        for request, generation in zip(self.requests, self.generations, strict=True):
            if request.generation == generation:
                yield request


class StepBuilder:
    """Collects the rows of one step.

    Attributes:
        budget: Tokens that may still be added.
        plan: What is sent.
        in_flight: What is remembered.
    """

    __slots__ = ("budget", "in_flight", "plan")

    def __init__(self, step: int, *, budget: int, free_seq: int) -> None:
        self.budget = budget
        self.plan = StepPlan(step=step, free_seq=free_seq)
        self.in_flight = InFlightStep(step, self.plan.handles, self.plan.num_tokens)

    def add_row(
        self, request: Request, num_tokens: int, *, new_block_ids: Sequence[int], samples: bool
    ) -> None:
        """Let a request compute ``num_tokens``; the worker appends the blocks to its table."""
        plan, in_flight = self.plan, self.in_flight
        self.budget -= num_tokens
        plan.handles.append(request.handle)
        plan.num_tokens.append(num_tokens)
        if new_block_ids:
            plan.num_new_blocks.append(len(new_block_ids))
            plan.new_block_ids += new_block_ids
        else:
            plan.num_new_blocks.append(0)
        in_flight.requests.append(request)
        in_flight.generations.append(request.generation)
        in_flight.samples.append(samples)
        if num_tokens == 1:
            in_flight.num_decode_rows += 1
        else:
            in_flight.num_prefill_tokens += num_tokens

    def add_new_row(self, request: Request, *, num_computed_tokens: int) -> None:
        """Send a request whole; ``add_row`` says what it computes."""
        self.plan.new_rows.append(
            NewRow(
                handle=request.handle,
                choice=request.choice,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_computed_tokens,
                sampling=request.sampling,
                grammar_ref=request.grammar_ref,
                block_ids=tuple(request.block_ids),
                prompt_logprobs_done=request.prompt_logprobs_done,
                pools=request.pools,
            )
        )
