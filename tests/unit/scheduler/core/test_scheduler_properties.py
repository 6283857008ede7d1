"""Anything a caller may do, in any order: hypothesis against all invariants and the device."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from services.common.errors import ContextLengthExceeded, Overloaded, RequestFailed
from services.common.sampling import SamplingParams
from services.scheduler.core.output import AbortReason
from services.scheduler.core.request import RequestStatus
from tests.unit.scheduler.core.harness import Harness, Seen, limits


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted, prepared, moved; rows and steps fail; results come late.

    After every operation the harness checks all invariants; at the end everything is run out, and
    every request must have ended exactly once, with the tokens that it would have got alone.
    """

    depth = 1

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(
            limits(
                num_blocks=13,
                max_num_seqs=4,
                max_num_batched_tokens=12,
                max_model_len=40,
                vocab_size=30,
                pipeline_depth=self.depth,
                max_waiting=12,
            )
        )
        self.harness.step_s = 0.1

    def _alive(self) -> list[int]:
        return [h for h, seen in self.harness.seen.items() if seen.finished is None]

    @rule(
        prompt_ids=st.lists(st.sampled_from([7, 7, 7, 8]), min_size=1, max_size=14),
        max_tokens=st.integers(1, 10),
        num_choices=st.sampled_from([1, 1, 2, 3]),
        num_resumed=st.sampled_from([0, 0, 3]),
        priority=st.sampled_from([0, 0, -1, 1]),
        needs_prepare=st.sampled_from([False, False, True]),
        pools=st.sampled_from([False, False, True]),
        deadline_in_s=st.sampled_from([None, None, 0.5]),
        options=st.sampled_from(
            [
                {"ignore_eos": True},
                {"min_tokens": 1},
                {"stop_token_ids": (8, 9)},
                {"prompt_logprobs": 0},
            ]
        ),
    )
    def add(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        num_choices: int,
        num_resumed: int,
        priority: int,
        needs_prepare: bool,
        pools: bool,
        deadline_in_s: float | None,
        options: dict[str, object],
    ) -> None:
        harness = self.harness
        if pools:
            num_choices, num_resumed = 1, 0
        sampling = SamplingParams(max_tokens=max_tokens, seed=3, **options)  # type: ignore[arg-type]
        choices = [
            harness.request(
                prompt_ids,
                sampling=sampling,
                choice=index,
                priority=priority,
                needs_prepare=needs_prepare,
                deadline_s=None if deadline_in_s is None else harness.now + deadline_in_s,
                prompt_logprobs_done=index > 0,
                pools=pools,
            )
            for index in range(num_choices)
        ]
        try:
            harness.add(*choices)
        except (Overloaded, ContextLengthExceeded):
            return
        if num_resumed:
            self._resume(choices[0].handle, num_resumed)

    def _resume(self, handle: int, num_resumed: int) -> None:
        """The same request once more, as if another attempt had got some way."""
        harness = self.harness
        request = harness.seen[handle].request
        resumed = harness.request(
            request.token_ids[: request.num_prompt_tokens],
            sampling=request.sampling,
            resume_ids=harness.expected(handle)[:num_resumed],
            attempt=1,
        )
        try:
            harness.add(resumed)
        except Overloaded:
            return
        harness.take_finished()

    @precondition(lambda self: self._alive())
    @rule(data=st.data(), reason=st.sampled_from(list(AbortReason)))
    def abort(self, data: st.DataObject, reason: AbortReason) -> None:
        handle = data.draw(st.sampled_from(self._alive()))
        kept_tokens = len(self.harness.seen[handle].tokens)
        if reason is AbortReason.STOP_STRING:
            reason = AbortReason.CLIENT_GONE  # its tokens are not those of a whole run
        self.harness.scheduler.abort(
            handle, reason=reason, kept_tokens=kept_tokens, now=self.harness.now
        )
        self.harness.take_finished()
        self.harness.check()

    @rule(is_good=st.booleans())
    def prepare(self, is_good: bool) -> None:
        for handle in self._alive():
            if self.harness.seen[handle].request.status is RequestStatus.WAITING_FOR_PREPARE:
                error = None if is_good else RequestFailed("a bad grammar")
                self.harness.scheduler.prepared(handle, error=error, now=self.harness.now)
                self.harness.take_finished()
                self.harness.check()
                return

    @rule()
    def plan(self) -> None:
        self.harness.plan()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def receive(self) -> None:
        self.harness.receive()

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self._alive())
    @rule(data=st.data(), is_fatal=st.booleans())
    def spoil(self, data: st.DataObject, is_fatal: bool) -> None:
        handle = data.draw(st.sampled_from(self._alive()))
        device = self.harness.device
        (device.fatal_handles if is_fatal else device.bad_handles).add(handle)

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Withdraw a waiting request and add it again."""
        handle = data.draw(st.sampled_from(self._alive()))
        request = self.harness.scheduler.withdraw(handle)
        self.harness.check()
        if request is None:
            return
        self.harness.seen[handle] = Seen(request, list(request.output_ids))
        try:
            self.harness.scheduler.add([request], now=self.harness.now)
        except Overloaded:  # the choices of one request, added together, had overfilled the queue
            del self.harness.seen[handle]
        self.harness.take_finished()
        self.harness.check()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.harness.now += seconds
        self.harness.scheduler.expire(now=self.harness.now)
        self.harness.take_finished()
        self.harness.check()

    @rule()
    def read_events_and_reset(self) -> None:
        self.harness.scheduler.take_kv_events()
        is_free = self.harness.scheduler.load().kv_blocks_used == 0
        assert self.harness.scheduler.reset_prefix_cache() == is_free

    def teardown(self) -> None:
        self.harness.take_finished()
        for handle in self._alive():
            self.harness.scheduler.prepared(handle, error=None, now=self.harness.now)
        self.harness.run()
        self.harness.assert_all_served()


def _machine(depth: int) -> type[SchedulerMachine]:
    return type(f"SchedulerMachine{depth}", (SchedulerMachine,), {"depth": depth})


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_whatever_happens_every_request_ends_once_and_nothing_is_leaked_or_shared_wrongly(
    depth: int,
) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        _machine(depth),
        settings=settings(max_examples=40, stateful_step_count=40, deadline=None),
    )
