"""A fleet without a network: links answer on the loop, sinks write down what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.errors import SluicewayError
from services.common.pb import worker_pb2 as pb
from services.common.sampling import Constraint, SamplingParams
from services.scheduler import convert
from services.scheduler.attachment import Attachment
from services.scheduler.core.output import Finished, LoadSnapshot, StepPlan
from services.scheduler.engine import EnginePolicy
from services.scheduler.fleet import Fleet
from services.scheduler.kv_events import KvPublisher
from services.scheduler.submission import ChoiceSpec, Submission
from services.scheduler.ticket import Ticket
from services.scheduler.worker_profile import WorkerFacts, WorkerIdentity
from tests.fakes.worker import FakeExecutor, FakeWorkerSpec

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


class LoopbackLink:
    """A worker in this process: every step is answered on the loop unless it is held.

    Attributes:
        plans: Steps that were sent.
        is_held: Steps stay unanswered; ``answer`` runs the oldest.
        closed_with: Errors with which the stream was closed.
    """

    def __init__(self, spec: FakeWorkerSpec, *, is_held: bool = False) -> None:
        self.executor = FakeExecutor(spec)
        self.plans: list[StepPlan] = []
        self.prepares: list[int] = []
        self.released: list[int] = []
        self.is_held = is_held
        self.is_drained = False
        self.closed_with: list[SluicewayError | None] = []
        self.attachment: Attachment | None = None
        self._unanswered: list[bytes] = []

    @property
    def num_unanswered(self) -> int:
        """Steps that were sent and are held."""
        return len(self._unanswered)

    def send_step(self, plan: StepPlan) -> None:
        """See ``EngineLink``."""
        self.plans.append(plan)
        self._unanswered.append(convert.plan_to_bytes(plan))
        if not self.is_held:
            asyncio.get_running_loop().call_soon(self.answer)

    def prepare(self, ref: int, constraint: Constraint) -> None:
        """See ``EngineLink``."""
        self.prepares.append(ref)

    def release(self, ref: int) -> None:
        """See ``EngineLink``."""
        self.released.append(ref)

    def drain(self) -> None:
        """See ``WorkerStream``."""
        self.is_drained = True

    def close(self, error: SluicewayError | None = None) -> None:
        """See ``WorkerStream``."""
        self.closed_with.append(error)

    def answer(self) -> None:
        """Run the oldest unanswered step; a closed link runs nothing."""
        if self.closed_with or not self._unanswered:
            return
        step = pb.ScheduledStep.FromString(self._unanswered.pop(0))
        self.executor.apply_changes(step)
        result = self.executor.run(step)
        result.device_us = 1000
        self.answer_with(result)

    def answer_with(self, result: pb.StepResult) -> None:
        """Send any result, also a wrong one."""
        assert self.attachment is not None
        outcome, side = convert.outcome_from_bytes(result.SerializeToString())
        self.attachment.running_engine().on_result(outcome, side)


@dataclass(slots=True, eq=False)
class RecordingSink:
    """Writes down what tickets are told and checks the order of it."""

    tokens_of: dict[int, list[int]] = field(default_factory=dict)
    finished_of: dict[int, Finished] = field(default_factory=dict)
    queued_of: dict[int, list[int]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def queued(self, ticket: Ticket, *, position: int, eta_s: float | None) -> None:
        """See ``Sink``."""
        self.queued_of.setdefault(ticket.handle, []).append(position)
        self._check_open(ticket)

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
        """See ``Sink``."""
        self._check_open(ticket)
        have = self.tokens_of.setdefault(ticket.handle, [])
        resumed = _num_resumed(ticket)
        if offset != resumed + len(have):
            self.violations.append(f"{ticket.handle}: offset {offset}, had {resumed + len(have)}")
        have.extend(token_ids)

    def prompt_logprobs(self, ticket: Ticket, *, engine_id: int, step: int, chunk: object) -> None:
        """See ``Sink``."""
        self._check_open(ticket)

    def finished(self, ticket: Ticket, *, engine_id: int, step: int, finished: Finished) -> None:
        """See ``Sink``."""
        self._check_open(ticket)
        self.finished_of[ticket.handle] = finished
        self.changed.set()

    def flush(self, engine_id: int, load: LoadSnapshot | None) -> None:
        """See ``Sink``."""

    async def wait_finished(self, *handles: int, timeout_s: float = 30.0) -> None:
        """Wait until all handles have ended."""
        async with asyncio.timeout(timeout_s):
            while not all(handle in self.finished_of for handle in handles):
                self.changed.clear()
                await self.changed.wait()

    def _check_open(self, ticket: Ticket) -> None:
        if ticket.handle in self.finished_of:
            self.violations.append(f"{ticket.handle} was told something after its end")


class Loopback:
    """A fleet and what is needed to drive it.

    Attributes:
        now: The fleet's clock; moves only when a test moves it.
    """

    def __init__(self, tasks: asyncio.TaskGroup, policy: EnginePolicy | None = None) -> None:
        self.now = 1000.0
        self.fleet = Fleet(
            tasks=tasks,
            policy=policy or EnginePolicy(),
            publisher=KvPublisher((), cluster_token=None),
            clock=lambda: self.now,
        )
        self.sink = RecordingSink()
        self.links: list[LoopbackLink] = []
        self._last_handle = 0

    def attach(
        self,
        spec: FakeWorkerSpec | None = None,
        *,
        engine_id: int = 0,
        is_held: bool = False,
        is_ready: bool = True,
    ) -> LoopbackLink:
        """Attach a worker; by default it is ready at once."""
        spec = spec or FakeWorkerSpec(worker_id=f"worker-{len(self.links)}")
        link = LoopbackLink(spec, is_held=is_held)
        identity = WorkerIdentity(
            engine_id=engine_id or 100 + len(self.links),
            worker_id=spec.worker_id,
            model=spec.model,
            text_fp=spec.text_fp,
            kv_fp=spec.kv_fp,
            address="",
        )
        link.attachment = self.fleet.attach(identity, link)
        self.links.append(link)
        if is_ready:
            self.fleet.on_ready(link.attachment, facts_of(spec))
        return link

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        request_id: str | None = None,
        attempt: int = 0,
        num_choices: int = 1,
        resume_ids: Sequence[int] = (),
        crashes: int = 0,
        text_fp: str = "text-fp",
        model: str = "",
        constraint: Constraint | None = None,
    ) -> list[Ticket]:
        """Submit a request."""
        choices = tuple(
            ChoiceSpec(self._last_handle + 1 + index, index, tuple(resume_ids))
            for index in range(num_choices)
        )
        self._last_handle += num_choices
        submission = Submission(
            request_id=request_id or f"request-{self._last_handle}",
            attempt=attempt,
            model=model,
            text_fp=text_fp,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            choices=choices,
            crashes=crashes,
            constraint=constraint,
        )
        tickets = self.fleet.make_tickets(submission, self.sink)
        self.fleet.submit(tickets)
        return tickets

    def check(self) -> None:
        """Nobody has broken the rules."""
        assert self.sink.violations == []
        for link in self.links:
            assert link.executor.violations == []

    def close(self) -> None:
        """End all engines."""
        self.fleet.abandon_all("the test is over")


def facts_of(spec: FakeWorkerSpec) -> WorkerFacts:
    """What a worker of this size would discover."""
    return WorkerFacts(
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        pipeline_depth=spec.pipeline_depth,
        revision="fake-revision",
    )


async def settle(turns: int = 20) -> None:
    """Let the loop do all that can be done without anything new happening."""
    for _ in range(turns):
        await asyncio.sleep(0)


def _num_resumed(ticket: Ticket) -> int:
    choice = next(c for c in ticket.submission.choices if c.handle == ticket.handle)
    return len(choice.resume_ids)
