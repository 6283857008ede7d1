"""A worker that dials in over real gRPC and answers steps by a rule instead of a model.

The next token is the last one plus 1, modulo the vocabulary. It keeps the rules of a pipelined
step, and a cache of its own in which every slot remembers the token it was written for: a block
that the scheduler gives out wrongly, or a wrong prefix hit, shows as a violation.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

import grpc

from services.common.pb import common_pb2, scheduler_pb2_grpc
from services.common.pb import worker_pb2 as pb
from services.common.rpc import PROTOCOL, connect

HEARTBEAT_S = 0.2


def next_token(last: int, *, vocab_size: int) -> int:
    """The rule that stands for the model."""
    return (last + 1) % vocab_size


def expected_output(prompt_ids: Iterable[int], count: int, *, vocab_size: int = 1000) -> list[int]:
    """The first ``count`` tokens that a fake worker answers to a prompt."""
    last = list(prompt_ids)[-1]
    return [(last + 1 + i) % vocab_size for i in range(count)]


@dataclass(slots=True)
class FakeRow:
    """One running request as the worker keeps it."""

    token_ids: list[int]
    num_computed: int
    block_ids: list[int]
    num_prompt: int
    num_logprobs: int | None
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWorkerSpec:
    """Who the fake is and how big.

    Attributes:
        step_time_s: How long a step takes.
        bad_row_token: A row that holds this token ends in a row error.
        bad_step_token: A step with a row that holds this token fails as a whole.
        deadly_token: The worker dies in a step with a row that holds this token.
    """

    worker_id: str = "worker-0"
    engine_id: int = 0
    model: str = "fake"
    text_fp: str = "text-fp"
    kv_fp: str = "kv-fp"
    protocol: int = PROTOCOL
    num_blocks: int = 65
    block_size: int = 4
    max_model_len: int = 256
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    vocab_size: int = 1000
    eos_token_ids: tuple[int, ...] = (999,)
    pipeline_depth: int = 2
    step_time_s: float = 0.0
    bad_row_token: int | None = None
    bad_step_token: int | None = None
    deadly_token: int | None = None


class FakeExecutor:
    """Runs steps by the rule; no network, no time.

    Attributes:
        violations: What the scheduler did wrong.
        num_tokens_run: Tokens that all steps were told to compute.
    """

    def __init__(self, spec: FakeWorkerSpec) -> None:
        self.spec = spec
        self.violations: list[str] = []
        self.num_tokens_run = 0
        self._rows: dict[int, FakeRow] = {}
        self._slots: dict[int, tuple[int, int]] = {}

    @property
    def num_rows(self) -> int:
        """Rows that have not been ended."""
        return len(self._rows)

    def apply_changes(self, step: pb.ScheduledStep) -> None:
        """Apply finished and preempted, new rows, and diffs, in this order."""
        for handle in (*step.finished, *step.preempted):
            if self._rows.pop(handle, None) is None:
                self._complain(f"step {step.step} ends row {handle}, which is not there")
        for new in step.new_requests:
            if new.handle in self._rows:
                self._complain(f"step {step.step} sends row {new.handle} a second time")
            if 0 in new.block_ids:
                self._complain(f"row {new.handle} was given the null block")
            logprobs = new.sampling.logprobs if new.sampling.HasField("logprobs") else None
            self._rows[new.handle] = FakeRow(
                list(new.token_ids),
                new.num_computed_tokens,
                list(new.block_ids),
                new.num_prompt_tokens,
                logprobs,
            )
        blocks = deque(step.new_block_ids)
        for handle, count in zip(step.handle, step.num_new_blocks, strict=True):
            row = self._rows.get(handle)
            taken = [blocks.popleft() for _ in range(count)]
            if row is None:
                self._complain(f"step {step.step} runs row {handle}, which is not there")
            else:
                row.block_ids.extend(taken)

    def run(self, step: pb.ScheduledStep) -> pb.StepResult:
        """Compute the rows of a step whose changes were applied."""
        result = pb.StepResult(step=step.step)
        if self.touches(step, self.spec.bad_step_token):
            result.failed.CopyFrom(pb.StepFailure(error_class="ValueError", message="bad step"))
            return result
        running = [
            (handle, self._rows[handle], count)
            for handle, count in zip(step.handle, step.num_tokens, strict=True)
            if handle in self._rows
        ]
        for handle, row, count in running:
            self._write_slots(handle, row, count)
        for handle, row, count in running:
            self._run_row(result, handle, row, count)
        return result

    def _write_slots(self, handle: int, row: FakeRow, count: int) -> None:
        size = self.spec.block_size
        self.num_tokens_run += count
        for position in range(row.num_computed, min(row.num_computed + count, len(row.token_ids))):
            index = position // size
            if index >= len(row.block_ids):
                self._complain(f"row {handle} has no block for position {position}")
                return
            slot = row.block_ids[index] * size + position % size
            self._slots[slot] = (position, row.token_ids[position])

    def _run_row(self, result: pb.StepResult, handle: int, row: FakeRow, count: int) -> None:
        result.handle.append(handle)
        if row.has_ended:
            result.num_sampled.append(0)
            return
        row.num_computed = min(row.num_computed + count, len(row.token_ids))
        self._check_slots(handle, row)
        if self.spec.bad_row_token in row.token_ids:
            row.has_ended = True
            result.row_error_handle.append(handle)
            result.row_error.add(error_class="RequestFailed", message="NaN in the logits")
            result.num_sampled.append(0)
        elif row.num_computed == len(row.token_ids):
            result.num_sampled.append(1)
            self._sample(result, row)
        else:
            result.num_sampled.append(0)

    def _sample(self, result: pb.StepResult, row: FakeRow) -> None:
        token = next_token(row.token_ids[-1], vocab_size=self.spec.vocab_size)
        row.token_ids.append(token)
        if row.num_logprobs is not None:
            columns = result.logprobs
            columns.position.append(len(result.token_ids))
            columns.logprob.append(-float(token))
            columns.rank.append(1)
            columns.num_top.append(row.num_logprobs)
            columns.top_ids.extend(token + i for i in range(row.num_logprobs))
            columns.top_logprobs.extend(-float(token + i) for i in range(row.num_logprobs))
        result.token_ids.append(token)

    def _check_slots(self, handle: int, row: FakeRow) -> None:
        size = self.spec.block_size
        for position in range(row.num_computed):
            slot = row.block_ids[position // size] * size + position % size
            if self._slots.get(slot) != (position, row.token_ids[position]):
                self._complain(f"row {handle} reads a wrong slot at position {position}")
                return

    def touches(self, step: pb.ScheduledStep, token: int | None) -> bool:
        """Whether a row of the step holds a token."""
        if token is None:
            return False
        rows = [self._rows[handle] for handle in step.handle if handle in self._rows]
        return any(token in row.token_ids for row in rows)

    def _complain(self, text: str) -> None:
        self.violations.append(text)


class FakeWorker:
    """Use as ``async with FakeWorker(address, spec) as worker``; it attaches at once.

    Attributes:
        steps: Every ScheduledStep that has come, in order.
        prepares: Every Prepare that has come.
        released: Refs that the scheduler has let go.
        executor: What runs the steps; its ``violations`` say what the scheduler did wrong.
        welcome: The scheduler's answer to the Hello.
        may_step: Cleared = steps are held back, while heartbeats go on.
        may_prepare: Cleared = prepares are not answered.
        num_steps_found_waiting: Steps that were there before the one before them had ended.
        ended: Set once the stream has ended; ``error`` says how, ``None`` = well.
    """

    def __init__(
        self,
        address: str,
        spec: FakeWorkerSpec | None = None,
        *,
        becomes_ready: bool = True,
        cluster_token: str | None = None,
    ) -> None:
        self.spec = spec or FakeWorkerSpec()
        self.engine_id = self.spec.engine_id or _fresh_engine_id()
        self.steps: list[pb.ScheduledStep] = []
        self.prepares: list[pb.Prepare] = []
        self.released: list[int] = []
        self.executor = FakeExecutor(self.spec)
        self.welcome: pb.EngineWelcome | None = None
        self.welcomed = asyncio.Event()
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.drain_asked = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: grpc.aio.AioRpcError | None = None
        self.max_queued_steps = 0
        self.num_steps_found_waiting = 0
        self._address = address
        self._token = cluster_token
        self._becomes_ready = becomes_ready
        self._inbox: asyncio.Queue[pb.ScheduledStep] = asyncio.Queue()
        self._outbox: asyncio.Queue[pb.WorkerFrame] = asyncio.Queue()
        self._step_came = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._ended_at = time.monotonic()
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def __aenter__(self) -> FakeWorker:
        await self._group.__aenter__()
        self._channel = connect(self._address, cluster_token=self._token)
        self._call = scheduler_pb2_grpc.SchedulerStub(self._channel).Attach()
        self._tasks = [
            self._group.create_task(self._read()),
            self._group.create_task(self._write()),
            self._group.create_task(self._beat()),
            self._group.create_task(self._execute()),
        ]
        self._say_hello()
        if self._becomes_ready:
            self.say_ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.die()
        await self._group.__aexit__(kind, error, trace)

    async def die(self) -> None:
        """End at once, as a killed process does."""
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await self._channel.close()
        self.ended.set()

    def freeze(self) -> None:
        """Say nothing and read nothing until ``thaw``."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Undo ``freeze``."""
        self._thawed.set()

    def say_ready(self) -> None:
        """Tell the scheduler that loading is over."""
        self._put(ready=pb.Ready(info=self._info()))

    def say_loading(self, phase: str, fraction: float) -> None:
        """Tell the scheduler how far loading is."""
        self._put(loading=common_pb2.Loading(phase=phase, fraction=fraction))

    def say_drained(self) -> None:
        """Tell the scheduler that this worker is empty or wants to leave."""
        self._put(drained=pb.Drained())

    def say(self, frame: pb.WorkerFrame) -> None:
        """Send any frame, also a wrong one."""
        self._outbox.put_nowait(frame)

    async def has_been_sent(self, num_steps: int, *, timeout_s: float = 60.0) -> None:
        """Wait until so many steps have come."""
        async with asyncio.timeout(timeout_s):
            while len(self.steps) < num_steps:
                self._step_came.clear()
                await self._step_came.wait()

    # What the scheduler says

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                await self._thawed.wait()
                self._on_frame(frame)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            self.ended.set()
            raise
        self.ended.set()

    def _on_frame(self, frame: pb.EngineFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "welcome":
            self.welcome = frame.welcome
            self.welcomed.set()
        elif kind == "step":
            step = pb.ScheduledStep.FromString(frame.step)
            self.steps.append(step)
            self._step_came.set()
            self._inbox.put_nowait(step)
            self.max_queued_steps = max(self.max_queued_steps, self._inbox.qsize())
        elif kind == "prepare":
            self.prepares.append(frame.prepare)
            self._tasks.append(self._group.create_task(self._prepare(frame.prepare)))
        elif kind == "release":
            self.released.extend(frame.release.ref)
        elif kind == "drain":
            self.drain_asked.set()
            self.say_drained()

    async def _prepare(self, prepare: pb.Prepare) -> None:
        await self.may_prepare.wait()
        answer = pb.Prepared(ref=prepare.ref)
        if "broken" in prepare.grammar.spec:
            answer.error.CopyFrom(
                common_pb2.ErrorDetail(error_class="InvalidRequest", message="a broken grammar")
            )
        self._put(prepared=answer)

    async def _write(self) -> None:
        try:
            while True:
                frame = await self._outbox.get()
                await self._thawed.wait()
                await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader says how the stream ended

    async def _beat(self) -> None:
        while not self.ended.is_set():
            await asyncio.sleep(HEARTBEAT_S)
            self._put(heartbeat=pb.Heartbeat())

    def _say_hello(self) -> None:
        spec = self.spec
        hello = pb.WorkerHello(
            protocol=spec.protocol,
            worker_id=spec.worker_id,
            engine_id=self.engine_id,
            model=spec.model,
            text_fp=spec.text_fp,
            kv_fp=spec.kv_fp,
            address="127.0.0.1:1",
        )
        if not self._becomes_ready:
            hello.loading.CopyFrom(common_pb2.Loading(phase="weights", fraction=0.0))
        self._put(hello=hello)

    def _info(self) -> common_pb2.WorkerInfo:
        spec = self.spec
        return common_pb2.WorkerInfo(
            num_blocks=spec.num_blocks,
            kv_groups=[common_pb2.KvGroup(block_size=spec.block_size, kind="full")],
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            pipeline_depth=spec.pipeline_depth,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            revision="fake-revision",
            device="cpu",
            dtype="float32",
        )

    def _put(self, **frame: object) -> None:
        self._outbox.put_nowait(pb.WorkerFrame(**frame))  # type: ignore[arg-type]

    # Running steps

    async def _execute(self) -> None:
        while True:
            self.num_steps_found_waiting += not self._inbox.empty()
            step = await self._inbox.get()
            await self.may_step.wait()
            began_at = time.monotonic()
            gap_s = began_at - self._ended_at
            if self.spec.step_time_s and step.handle:
                await asyncio.sleep(self.spec.step_time_s)
            self.executor.apply_changes(step)
            if self.executor.touches(step, self.spec.deadly_token):
                await self.die()
                return
            result = self.executor.run(step)
            self._ended_at = time.monotonic()
            result.device_us = int((self._ended_at - began_at) * 1e6)
            result.gap_us = min(int(gap_s * 1e6), 2**32 - 1)
            self._put(step_result=result.SerializeToString())


_ids = iter(range(1, 1 << 20))


def _fresh_engine_id() -> int:
    return (int(time.time() * 1000) << 20) | next(_ids)
