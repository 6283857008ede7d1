"""Whatever happens, in whatever order, every accepted handle ends exactly once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling import SamplingParams
from services.scheduler.core.output import AbortReason, FinishReason
from services.scheduler.lives import HandleState
from services.scheduler.ticket import Ticket
from tests.fakes.worker import FakeWorkerSpec, expected_output
from tests.unit.scheduler.loopback import Loopback, settle

SPEC = FakeWorkerSpec(num_blocks=14, max_num_seqs=3, max_num_batched_tokens=12, bad_row_token=500)
EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 20)),
    st.tuples(st.just("submit_n"), st.integers(1, 12)),
    st.tuples(st.just("submit_bad_row"), st.integers(1, 5)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("answer"), st.integers(1, 4)),
    st.tuples(st.just("attach"), st.just(0)),
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.just("drain"), st.integers(0, 3)),
    st.tuples(st.just("stall"), st.just(0)),
)


class Run:
    """One history."""

    def __init__(self, here: Loopback) -> None:
        self.here = here
        self.tickets: list[Ticket] = []
        self._num_workers = 0

    async def play(self, events: list[tuple[str, int]]) -> None:
        self.attach(0)
        for name, value in events:
            getattr(self, name)(value)
            await settle(6)
        await self._finish()

    def attach(self, _: int) -> None:
        self._num_workers += 1
        spec = replace(SPEC, worker_id=f"w{self._num_workers % 3}")
        self.here.attach(spec, engine_id=self._num_workers, is_held=True)

    def submit(self, length: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=1 + length % 7, ignore_eos=True)
        self.tickets += self.here.submit(range(1, length + 1), sampling)

    def submit_n(self, length: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        self.tickets += self.here.submit(range(1, length + 1), sampling, num_choices=3)

    def submit_bad_row(self, length: int) -> None:
        self.tickets += self.here.submit([*range(1, length + 1), 500])

    def abort(self, index: int) -> None:
        if self.tickets:
            ticket = self.tickets[index % len(self.tickets)]
            self.here.fleet.abort(ticket, reason=AbortReason.CLIENT_GONE)

    def answer(self, count: int) -> None:
        for link in self.here.links:
            for _ in range(count):
                link.answer()

    def lose(self, index: int) -> None:
        attachments = self.here.fleet.attachments()
        if attachments:
            attachment = attachments[index % len(attachments)]
            self.here.fleet.detach(attachment, reason="it died")

    def drain(self, index: int) -> None:
        attachments = self.here.fleet.attachments()
        if attachments:
            self.here.fleet.drain_engine(attachments[index % len(attachments)])

    def stall(self, _: int) -> None:
        self.here.now += 11
        self.here.fleet.tick()

    async def _finish(self) -> None:
        for _ in range(1000):
            if not self.here.fleet.num_tickets:
                return
            self.answer(2)
            self.here.now += 0.01
            self.here.fleet.tick()
            await settle(6)

    def check(self) -> None:
        self.here.check()
        for ticket in self.tickets:
            assert ticket.life.state is HandleState.FINISHED
            end = self.here.sink.finished_of[ticket.handle]
            got = self.here.sink.tokens_of.get(ticket.handle, [])
            prompt = ticket.submission.prompt_ids
            assert got == expected_output(prompt, len(got)), "no token is lost, doubled or wrong"
            if end.reason is FinishReason.LENGTH:
                assert len(got) == ticket.submission.sampling.max_tokens
        for attachment in self.here.fleet.attachments():
            if attachment.engine is not None:
                assert attachment.engine.load().kv_blocks_used == 0
        for link in self.here.links:
            for error in link.closed_with:
                assert error is None or "failed" not in error.message, "no engine broke a rule"


@settings(max_examples=40)
@given(st.lists(EVENTS, max_size=30))
def test_every_handle_ends_once_with_the_right_tokens(events: list[tuple[str, int]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            here = Loopback(tasks)
            run = Run(here)
            await run.play(events)
            run.check()
            here.close()

    asyncio.run(main())
