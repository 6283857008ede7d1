"""The worker as a whole: attachments, steps, health, drain, against a scheduler over real gRPC."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from services.common.errors import ConfigError
from services.common.fingerprint import text_fingerprint
from services.common.lifecycle import Lifecycle
from services.common.pb import common_pb2, worker_pb2, worker_pb2_grpc
from services.common.rpc import PROTOCOL, connect
from services.worker import peer_watch
from services.worker.config import WorkerConfig
from services.worker.service import serve
from tests.tiny_models import EOS_TOKEN_ID, make_tiny_model
from tests.unit.worker.fake_scheduler import FakeAttachment, FakeScheduler, fake_scheduler

# Generous: the machine that runs the tests may be shared.
DEADLINE_S = 60
SERVING = health_pb2.HealthCheckResponse.SERVING
PROMPT = (5, 80, 12, 33, 7)


def config_for(model: Path, *schedulers: str, **fields: object) -> WorkerConfig:
    """Small sizes, any free port."""
    values: dict[str, object] = {
        "model": model,
        "schedulers": schedulers,
        "port": 0,
        "http_port": 0,
        "worker_id": "w1",
        "num_threads": 1,
        "num_gpu_blocks_override": 64,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    return WorkerConfig(**{**values, **fields})  # type: ignore[arg-type]


@asynccontextmanager
async def running_worker(config: WorkerConfig) -> AsyncIterator[Lifecycle]:
    """``serve`` in a task; it is ended hard afterwards if the test has not stopped it."""
    life = Lifecycle()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(serve(config, life))
        yield life
        task.cancel()


async def welcomed(scheduler: FakeScheduler) -> FakeAttachment:
    """The next attachment, accepted."""
    attachment = await scheduler.attachments.get()
    attachment.welcome()
    return attachment


def new_request(
    handle: int, *, blocks: tuple[int, ...], prompt: tuple[int, ...] = PROMPT
) -> worker_pb2.NewRequest:
    """A greedy request."""
    return worker_pb2.NewRequest(
        handle=handle,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=common_pb2.SamplingParams(temperature=0.0),
        block_ids=blocks,
    )


def first_step(*, step: int = 1, handle: int = 1) -> worker_pb2.ScheduledStep:
    """A whole prefill of one request."""
    return worker_pb2.ScheduledStep(
        step=step,
        new_requests=[new_request(handle, blocks=(1,))],
        handle=[handle],
        num_tokens=[len(PROMPT)],
        num_new_blocks=[0],
    )


def decode_step(*, step: int, handle: int = 1) -> worker_pb2.ScheduledStep:
    """One more token of a known request."""
    return worker_pb2.ScheduledStep(step=step, handle=[handle], num_tokens=[1], num_new_blocks=[0])


async def test_a_worker_dials_in_before_it_loads_and_says_ready_after(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address, served_model_name="tiny", pipeline_depth=3)),
    ):
        attachment = await welcomed(scheduler)
        hello = attachment.hello
        assert (hello.protocol, hello.worker_id, hello.model) == (PROTOCOL, "w1", "tiny")
        assert hello.HasField("loading")
        assert hello.text_fp == text_fingerprint(served_dir)
        assert hello.kv_fp and hello.address
        milliseconds = hello.engine_id >> 20
        assert abs(milliseconds / 1000 - time.time()) < DEADLINE_S
        info = (await attachment.expect("ready")).ready.info
        assert (info.num_blocks, info.max_model_len, info.max_num_seqs) == (64, 256, 4)
        assert (info.max_num_batched_tokens, info.pipeline_depth) == (64, 3)
        assert (info.vocab_size, list(info.eos_token_ids)) == (320, [2])
        assert info.kv_groups[0].block_size == 16
        assert (info.device, info.dtype) == ("cpu", "float32")
        assert info.revision


async def test_steps_are_queued_and_answered_in_order(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        attachment = await welcomed(scheduler)
        await attachment.expect("ready")
        attachment.send_step(first_step())
        attachment.send_step(decode_step(step=2))
        attachment.send_step(decode_step(step=3))
        results = [await attachment.result() for _ in range(3)]
        assert [result.step for result in results] == [1, 2, 3]
        assert all(list(r.num_sampled) == [1] and len(r.token_ids) == 1 for r in results)
        assert all(result.device_us > 0 for result in results)


async def test_a_step_that_raises_is_answered_as_failed(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        attachment = await welcomed(scheduler)
        await attachment.expect("ready")
        attachment.send_step(first_step())
        broken = decode_step(step=2)
        broken.num_tokens[:] = [9]
        attachment.send_step(broken)
        attachment.send_step(decode_step(step=3))
        first, failed, after = [await attachment.result() for _ in range(3)]
        assert not first.HasField("failed")
        assert failed.failed.error_class == "InvariantError"
        assert "9 tokens" in failed.failed.message
        assert list(after.num_sampled) == [0]
        # Preempted and admitted again, the request gives the token it gave before.
        again = first_step(step=4)
        again.preempted.append(1)
        attachment.send_step(again)
        assert list((await attachment.result()).token_ids) == list(first.token_ids)


def prepare_frame(ref: int, kind: common_pb2.ConstraintKind, spec: str) -> worker_pb2.EngineFrame:
    """Have a grammar compiled."""
    constraint = common_pb2.Constraint(kind=kind, spec=spec)
    return worker_pb2.EngineFrame(prepare=worker_pb2.Prepare(ref=ref, grammar=constraint))


async def test_a_grammar_is_prepared_and_then_followed_to_its_end(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        attachment = await welcomed(scheduler)
        await attachment.expect("ready")
        attachment.send(prepare_frame(7, common_pb2.CONSTRAINT_KIND_REGEX, "[ab]{3}"))
        prepared = (await attachment.expect("prepared")).prepared
        assert (prepared.ref, prepared.HasField("error")) == (7, False)
        first = first_step()
        first.new_requests[0].grammar_ref = 7
        attachment.send_step(first)
        # The row keeps its grammar though nobody else may have it any more.
        attachment.send(worker_pb2.EngineFrame(release=worker_pb2.ReleasePrepared(ref=[7])))
        for step in range(2, 7):
            attachment.send_step(decode_step(step=step))
        results = [await attachment.result() for _ in range(6)]
        tokens = [token for result in results for token in result.token_ids]
        text = Tokenizer.from_file(str(served_dir / "tokenizer.json")).decode(tokens)
        assert re.fullmatch("[ab]{3}", text)
        assert tokens[-1] == EOS_TOKEN_ID
        # A text that has ended gives no more tokens, and that is no error.
        assert [list(result.num_sampled) for result in results[len(tokens) :]] == [[0]] * (
            6 - len(tokens)
        )
        assert not any(result.row_error_handle for result in results)


async def test_what_cannot_be_prepared_is_named_and_nothing_else_suffers(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        attachment = await welcomed(scheduler)
        await attachment.expect("ready")
        attachment.send(prepare_frame(1, common_pb2.CONSTRAINT_KIND_REGEX, "(?=a)b"))
        attachment.send(prepare_frame(2, common_pb2.CONSTRAINT_KIND_UNSPECIFIED, ""))
        by_ref = {}
        for _ in range(2):
            prepared = (await attachment.expect("prepared")).prepared
            by_ref[prepared.ref] = prepared.error
        assert by_ref[1].error_class == by_ref[2].error_class == "InvalidRequest"
        assert "look-around" in by_ref[1].message
        attachment.send_step(first_step())
        assert list((await attachment.result()).num_sampled) == [1]


async def test_every_attachment_is_a_new_engine_without_rows(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        first = await welcomed(scheduler)
        await first.expect("ready")
        first.send_step(first_step())
        await first.result()
        first.end()
        second = await welcomed(scheduler)
        assert second.hello.engine_id > first.hello.engine_id
        assert not second.hello.HasField("loading")
        await second.expect("ready")
        second.send_step(decode_step(step=1))
        assert list((await second.result()).num_sampled) == [0]


async def test_results_of_an_ended_attachment_are_not_sent_to_the_next(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        first = await welcomed(scheduler)
        await first.expect("ready")
        first.send_step(first_step(step=41))
        first.end()
        second = await welcomed(scheduler)
        await second.expect("ready")
        second.send_step(first_step(step=1))
        assert (await second.result()).step == 1


async def test_a_worker_outlives_its_scheduler_and_attaches_to_the_next_one_there(
    served_dir: Path,
) -> None:
    async with AsyncExitStack() as stack:
        async with fake_scheduler() as (scheduler, address):
            await stack.enter_async_context(running_worker(config_for(served_dir, address)))
            first = await welcomed(scheduler)
            await first.expect("ready")
            first.send_step(first_step())
            await first.result()
        # Its process is gone: nobody listens at the address until another one does.
        port = int(address.rpartition(":")[2])
        async with fake_scheduler(port=port) as (scheduler, _):
            second = await welcomed(scheduler)
            assert second.hello.engine_id > first.hello.engine_id
            assert not second.hello.HasField("loading")
            await second.expect("ready")
            second.send_step(first_step())
            assert list((await second.result()).num_sampled) == [1]


async def test_a_silent_scheduler_is_given_up(
    served_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_watch, "DEAD_AFTER_S", 1.0)
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        first = await welcomed(scheduler)
        await first.expect("ready")
        first.is_silent = True
        await first.ended()
        second = await welcomed(scheduler)
        assert second.hello.engine_id > first.hello.engine_id


async def test_a_worker_goes_where_it_is_redirected(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (first, first_address),
        fake_scheduler() as (second, second_address),
        running_worker(config_for(served_dir, first_address)),
    ):
        (await first.attachments.get()).welcome(redirect=second_address)
        await (await welcomed(second)).expect("ready")


async def test_a_refused_worker_tries_the_next_scheduler(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (one, one_address),
        fake_scheduler() as (other, other_address),
        running_worker(config_for(served_dir, one_address, other_address)),
    ):
        getters = [asyncio.ensure_future(fake.attachments.get()) for fake in (one, other)]
        done, _ = await asyncio.wait(getters, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result().welcome(refused="text_fp differs")
        await asyncio.wait(getters)
        assert all(getter.done() for getter in getters)


async def test_a_worker_that_one_scheduler_drains_goes_to_another(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (one, one_address),
        fake_scheduler() as (other, other_address),
        running_worker(config_for(served_dir, one_address, other_address)),
    ):
        getters = [asyncio.ensure_future(fake.attachments.get()) for fake in (one, other)]
        done, waiting = await asyncio.wait(getters, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop().result()
        first.welcome()
        await first.expect("ready")
        first.send(worker_pb2.EngineFrame(drain=worker_pb2.DrainWorker()))
        await first.expect("drained")
        first.end()
        second = await waiting.pop()
        second.welcome()
        await second.expect("ready")
        assert second.hello.engine_id > first.hello.engine_id


async def test_a_frame_that_is_no_step_ends_the_attachment(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        first = await welcomed(scheduler)
        await first.expect("ready")
        first.send(worker_pb2.EngineFrame(step=b"\xff\xff\xff"))
        await first.ended()
        await (await welcomed(scheduler)).expect("ready")


async def test_a_stopping_worker_asks_to_be_drained_and_leaves_when_told(
    served_dir: Path,
) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)) as life,
    ):
        attachment = await welcomed(scheduler)
        await attachment.expect("ready")
        attachment.send_step(first_step())
        await attachment.result()
        life.stop()
        await attachment.expect("drained")
        # What runs here may still go on.
        attachment.send_step(decode_step(step=2))
        assert list((await attachment.result()).num_sampled) == [1]
        attachment.send(worker_pb2.EngineFrame(drain=worker_pb2.DrainWorker()))
        await attachment.expect("drained")
        attachment.end()


async def test_a_stopping_worker_does_not_wait_for_ever(served_dir: Path) -> None:
    async with fake_scheduler() as (scheduler, address):
        life = Lifecycle()
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(
                serve(config_for(served_dir, address, drain_timeout_s=0.5), life)
            )
            attachment = await welcomed(scheduler)
            await attachment.expect("ready")
            life.stop()
            await task


async def test_ready_follows_the_attachment(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        attachment = await scheduler.attachments.get()
        channel = connect(attachment.hello.address, cluster_token=None)
        health = health_pb2_grpc.HealthStub(channel)
        live = await health.Check(health_pb2.HealthCheckRequest(service=""))
        assert live.status == SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service="ready"))
        replies = aiter(watch)
        assert (await anext(replies)).status != SERVING
        attachment.welcome()
        await attachment.expect("ready")
        assert (await anext(replies)).status == SERVING
        attachment.end()
        assert (await anext(replies)).status != SERVING
        watch.cancel()
        await channel.close()


async def test_info_shows_loading_and_then_what_was_discovered(served_dir: Path) -> None:
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(served_dir, address)),
    ):
        attachment = await welcomed(scheduler)
        channel = connect(attachment.hello.address, cluster_token=None)
        stub = worker_pb2_grpc.WorkerStub(channel)
        early = (await stub.Info(worker_pb2.WorkerInfoRequest())).state
        assert early.worker_id == "w1"
        assert early.HasField("loading") != early.HasField("info")
        await attachment.expect("ready")
        state = (await stub.Info(worker_pb2.WorkerInfoRequest())).state
        assert state.phase == common_pb2.ENGINE_PHASE_READY
        assert state.info.num_blocks == 64
        assert state.engine_id == attachment.hello.engine_id
        assert state.scheduler_address == address
        await channel.close()


async def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_reason(
    served_dir: Path,
) -> None:
    async with fake_scheduler() as (_, address):
        config = config_for(
            served_dir, address, num_gpu_blocks_override=None, kv_cache_memory_bytes=50_000
        )
        with pytest.RaisesGroup(
            pytest.RaisesExc(ConfigError, match=r"--max-model-len to at most 48,")
        ):
            await serve(config, Lifecycle())


async def test_health_answers_within_50_ms_while_a_long_prefill_runs(tmp_path: Path) -> None:
    heavy = make_tiny_model(
        tmp_path / "heavy",
        tokenizer=True,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=8,
    )
    sizes = {"max_num_batched_tokens": 1024, "max_model_len": 1024, "num_gpu_blocks_override": 80}
    async with (
        fake_scheduler() as (scheduler, address),
        running_worker(config_for(heavy, address, **sizes)),
    ):
        attachment = await welcomed(scheduler)
        await attachment.expect("ready")
        channel = connect(attachment.hello.address, cluster_token=None)
        health = health_pb2_grpc.HealthStub(channel)

        async def probe() -> float:
            started = time.perf_counter()
            await health.Check(health_pb2.HealthCheckRequest(service=""))
            return time.perf_counter() - started

        await probe()  # the channel's first call connects
        for step in range(1, 4):
            attachment.send_step(prefill_of_1000(step))
        prefills = asyncio.ensure_future(next_results(attachment, 3))
        probes = []
        while not prefills.done():
            probes.append(await probe())
        await channel.close()
        # Had the loop stood still for one, a probe would have taken twice what is allowed.
        assert all(result.device_us > 100_000 for result in await prefills)
        assert len(probes) >= 20
        assert statistics.quantiles(probes, n=20)[-1] < 0.05


def prefill_of_1000(step: int) -> worker_pb2.ScheduledStep:
    """A new request of a thousand tokens; the one before ends."""
    prompt = tuple(i % 300 for i in range(1000))
    return worker_pb2.ScheduledStep(
        step=step,
        finished=[step - 1],
        new_requests=[new_request(step, blocks=tuple(range(1, 64)), prompt=prompt)],
        handle=[step],
        num_tokens=[1000],
        num_new_blocks=[0],
    )


async def next_results(attachment: FakeAttachment, count: int) -> list[worker_pb2.StepResult]:
    """The results of the next steps."""
    return [await attachment.result() for _ in range(count)]
