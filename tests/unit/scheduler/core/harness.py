"""A scheduler, a device and a client in one: runs steps and checks everything it sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.block_hash import root_key
from services.common.sampling import SamplingParams
from services.scheduler.core.output import Finished, FinishReason, StepPlan, StepUpdate
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import EngineLimits, Scheduler
from tests.unit.scheduler.core.device import Device, expected_output, vector_of
from tests.unit.scheduler.core.invariants import check_scheduler

ROOT = root_key("test weights")
EOS = 1


def limits(**changes: Any) -> EngineLimits:
    """Small limits, with changes."""
    values: dict[str, Any] = {
        "num_blocks": 65,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "eos_token_ids": (EOS,),
        "vocab_size": 100,
        "pipeline_depth": 1,
    }
    return EngineLimits(**(values | changes))


@dataclass
class Seen:
    """What a client has seen of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None


class Harness:
    """Drives a scheduler against a device; every operation is followed by all invariants.

    Attributes:
        now: The clock; set it freely, forward.
        seen: Per handle.
        plans: All plans so far, and ``in_flight`` those whose results were not applied.
    """

    def __init__(self, engine_limits: EngineLimits | None = None, *, checks: bool = True) -> None:
        self.limits = engine_limits or limits()
        self.scheduler = Scheduler(self.limits)
        self.device = Device(
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            vocab_size=self.limits.vocab_size,
            eos_token_ids=self.limits.eos_token_ids,
        )
        self.now = 0.0
        self.step_s = 0.0
        self.seen: dict[int, Seen] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        self._checks = checks
        self._last_handle = 0

    # ---- operations

    def request(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = 4,
        seed: int = 0,
        resume_ids: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        **fields: Any,
    ) -> Request:
        """Make a request with the next handle; it ignores EOS unless ``sampling`` is given."""
        self._last_handle += 1
        fields.setdefault("arrival_s", self.now)
        fields.setdefault("root_key", ROOT)
        return Request(
            handle=self._last_handle,
            request_id=f"request-{self._last_handle}",
            prompt_ids=prompt_ids,
            resume_ids=resume_ids,
            sampling=sampling or SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True),
            **fields,
        )

    def add(self, *choices: Request) -> Request:
        """Add the choices of one request; gives back the first."""
        self.scheduler.add(choices, now=self.now)
        for request in choices:
            self.seen[request.handle] = Seen(request, list(request.output_ids))
        self.check()
        return choices[0]

    def plan(self) -> StepPlan | None:
        """Plan and send a step, if there is one."""
        plan = self.scheduler.schedule(now=self.now)
        if plan is not None:
            self._check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append(plan)
        self.check()
        return plan

    def receive(self) -> StepUpdate:
        """Run the oldest step in flight and apply its result."""
        plan = self.in_flight.popleft()
        self.now += self.step_s
        outcome = self.device.run(plan, device_s=self.step_s)
        update = self.scheduler.apply(outcome, now=self.now)
        self._take(update)
        self.check()
        return update

    def step(self) -> StepUpdate | None:
        """Fill the pipeline and take one result; None when there was nothing to do."""
        while self.plan() is not None:
            pass
        return self.receive() if self.in_flight else None

    def run(self, *, max_steps: int = 10_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(max_steps):
            if self.step() is None:
                self.take_finished()
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def take_finished(self) -> list[Finished]:
        """Take the ends that came outside of a result."""
        finished = self.scheduler.take_finished()
        for end in finished:
            self._take_end(end)
        return finished

    # ---- what a client checks

    def _take(self, update: StepUpdate) -> None:
        start = 0
        assert len(set(update.handles)) == len(update.handles)
        for handle, offset, count in zip(
            update.handles, update.offsets, update.counts, strict=True
        ):
            seen = self.seen[handle]
            assert seen.finished is None, "tokens after the end"
            assert offset == len(seen.tokens), "a gap"
            seen.tokens += update.token_ids[start : start + count]
            start += count
        assert start == len(update.token_ids)
        for end in update.finished:
            self._take_end(end)

    def _take_end(self, end: Finished) -> None:
        seen = self.seen[end.handle]
        assert seen.finished is None, "two ends"
        seen.finished = end
        assert (end.reason is FinishReason.ERROR) == (end.error is not None)
        usage = end.usage
        assert 0 <= usage.cached_tokens <= usage.prompt_tokens == seen.request.num_prompt_tokens
        assert usage.wasted_tokens <= usage.computed_tokens
        assert usage.output_tokens <= len(seen.tokens)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.step == len(self.plans) + 1
        assert plan.total_num_tokens == sum(plan.num_tokens) <= self.limits.max_num_batched_tokens
        assert len(plan.handles) <= self.limits.max_num_seqs
        assert len(set(plan.handles)) == len(plan.handles)
        assert all(num_tokens > 0 for num_tokens in plan.num_tokens)
        if self.plans and plan.preempted:
            assert not set(plan.preempted) & set(plan.handles) or plan.new_rows

    def check(self) -> None:
        """All invariants of the core."""
        if self._checks:
            check_scheduler(self.scheduler, self.limits)

    def expected(self, handle: int) -> list[int]:
        """What the request gets when it runs alone."""
        request = self.seen[handle].request
        if request.pools:
            return []
        return expected_output(
            request.token_ids[: request.num_prompt_tokens],
            sampling=request.sampling,
            choice=request.choice,
            max_tokens=request.max_total_tokens - request.num_prompt_tokens,
            eos_token_ids=self.limits.eos_token_ids,
            vocab_size=self.limits.vocab_size,
        )

    def expected_vector(self, request: Request) -> bytes:
        """What a request that pools gets."""
        return vector_of(request.token_ids[: request.num_prompt_tokens])

    def assert_all_served(self) -> None:
        """Every request has ended; those that ran to their end got what they would get alone."""
        for handle, seen in self.seen.items():
            assert seen.finished is not None, f"request {handle} never ended"
            expected = self.expected(handle)
            if seen.finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert seen.tokens == expected, f"request {handle}"
                assert seen.finished.usage.output_tokens == len(expected)
                wanted = self.expected_vector(seen.request) if seen.request.pools else b""
                assert seen.finished.pooled == wanted
            else:
                assert seen.tokens == expected[: len(seen.tokens)]
        assert self.scheduler.num_unfinished == 0
        assert self.scheduler.load().kv_blocks_used == 0
        assert not self.device.rows, "the worker was not told of an end"

    def reason(self, request: Request) -> FinishReason | None:
        """How a request ended, if it has."""
        finished = self.seen[request.handle].finished
        return None if finished is None else finished.reason

    def tokens(self, request: Request) -> list[int]:
        """Output that the client has."""
        return self.seen[request.handle].tokens
