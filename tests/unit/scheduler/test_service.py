"""The scheduler as its neighbours see it, over real gRPC on loopback."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY, generate_latest

from services.common.lifecycle import Lifecycle
from services.common.pb import common_pb2, scheduler_pb2_grpc, worker_pb2
from services.common.pb import scheduler_pb2 as pb
from services.common.rpc import translate
from services.common.sampling import Constraint, ConstraintKind, SamplingParams
from services.scheduler import liveness, outbox
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import drain, serve
from tests.fakes.worker import FakeWorkerSpec, expected_output
from tests.unit.scheduler.conftest import Stage

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def watch_health(stage: Stage, name: str) -> asyncio.Queue[int]:
    """A queue that gets every status of a health service."""
    statuses: asyncio.Queue[int] = asyncio.Queue()
    channel = await stage.channel()

    async def follow() -> None:
        request = health_pb2.HealthCheckRequest(service=name)
        async for reply in health_pb2_grpc.HealthStub(channel).Watch(request):
            statuses.put_nowait(reply.status)

    stage.start(follow())
    return statuses


async def expect(statuses: asyncio.Queue[int], status: int) -> None:
    """Wait for a status."""
    async with asyncio.timeout(30):
        while await statuses.get() != status:
            pass


async def test_a_request_gets_the_workers_tokens_and_one_finish(stage: Stage) -> None:
    _, client = await stage.pair()
    (handle,) = client.add([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=4))
    end = await client.finished(handle)
    assert client.handles[handle].token_ids == expected_output([5, 6, 7], 4)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (3, 4)
    assert client.handles[handle].queued, "the first Queued is the acceptance"
    life = end.life
    assert 0 < life.arrival_unix_ns <= life.scheduled_unix_ns <= life.first_token_unix_ns
    assert life.decision.chosen_engine_id == client.frames[0].engine_id


async def test_many_requests_share_steps_and_frames(stage: Stage) -> None:
    worker, client = await stage.pair()
    prompts = [[10 * i + 1, 10 * i + 2] for i in range(30)]
    handles = [client.add(p, SamplingParams(temperature=0.0, max_tokens=10))[0] for p in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        await client.finished(handle)
        assert client.handles[handle].token_ids == expected_output(prompt, 10)
    assert len(worker.steps) < 30 * 10 / 4
    assert len(client.frames) <= len(worker.steps)
    assert client.frames[-1].load.generated_tokens == 300


async def test_logprobs_come_with_the_tokens_that_they_describe(stage: Stage) -> None:
    _, client = await stage.pair()
    with_logprobs = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2)
    (plain,) = client.add([5, 6])
    (rich,) = client.add([50, 60], with_logprobs)
    await client.finished(plain)
    await client.finished(rich)
    heard = client.handles[rich]
    assert heard.logprobs == [-float(token) for token in heard.token_ids]
    assert client.handles[plain].logprobs == []


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_cancelled_request_frees_its_blocks_before_the_next_step_ends(
    stage: Stage, phase: str
) -> None:
    spec = FakeWorkerSpec(max_num_seqs=1, max_num_batched_tokens=8)
    worker, client = await stage.pair(spec)
    if phase != "decode":
        worker.may_step.clear()
    (first,) = client.add(list(range(1, 40)), LONG)
    (second,) = client.add([1, 2], LONG)
    if phase == "decode":
        await client.tokens(first, 3)
        worker.may_step.clear()
    else:
        await client.accepted(second)
    victim = second if phase == "queue" else first
    client.abort(victim)
    end = await client.finished(victim)
    assert end.reason == common_pb2.FINISH_REASON_ABORT
    if phase != "queue":
        client.abort(second)
        await client.finished(second)
        assert stage.blocks_used() == 0
    worker.may_step.set()


async def test_an_abort_right_behind_its_add_neither_overtakes_it_nor_lets_it_emit(
    stage: Stage,
) -> None:
    worker, client = await stage.pair()
    worker.may_step.clear()
    handles = [client.add([1, 2, 3], LONG)[0] for _ in range(5)]
    for handle in handles:
        client.abort(handle)
    for handle in handles:
        end = await client.finished(handle)
        assert end.reason == common_pb2.FINISH_REASON_ABORT
    worker.may_step.set()  # the results of steps that had been sent come now
    (last,) = client.add([4, 5])
    await client.finished(last)
    assert all(client.handles[handle].token_ids == [] for handle in handles)


async def test_a_request_that_waits_ends_at_its_deadline_though_nothing_else_happens(
    stage: Stage,
) -> None:
    worker, client = await stage.pair(FakeWorkerSpec(max_num_seqs=1))
    worker.may_step.clear()
    (runs,) = client.add([1, 2], LONG)
    await client.accepted(runs)
    (waits,) = client.add([3, 4], deadline_ms=300)
    end = await client.finished(waits)
    assert end.error.error_class == "DeadlineExceeded"
    assert client.handles[runs].finished is None


async def test_a_stop_string_ends_a_request_as_stopped_and_counts_what_was_kept(
    stage: Stage,
) -> None:
    _, client = await stage.pair(FakeWorkerSpec(step_time_s=0.01))
    (handle,) = client.add([5, 6], LONG)
    await client.tokens(handle, 4)
    client.abort(handle, reason=pb.ABORT_REASON_STOP_STRING, kept_tokens=[3])
    end = await client.finished(handle)
    assert end.reason == common_pb2.FINISH_REASON_STOP
    assert end.usage.output_tokens == 3
    assert end.usage.wasted_tokens >= 1


async def test_an_abort_of_an_unknown_or_ended_handle_is_dropped(stage: Stage) -> None:
    _, client = await stage.pair()
    (handle,) = client.add([5, 6])
    await client.finished(handle)
    client.abort(handle, 4711)
    (again,) = client.add([7, 8])
    await client.finished(again)
    assert client.handles[again].token_ids == expected_output([7, 8], 4)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(temperature=-1.0), "temperature"),
        (SamplingParams(stop_token_ids=(100_000,)), "stop_token_ids"),
    ],
)
async def test_bad_parameters_end_in_an_error_that_names_the_field(
    stage: Stage, sampling: SamplingParams, param: str
) -> None:
    _, client = await stage.pair()
    (handle,) = client.add([5, 6], sampling)
    end = await client.finished(handle)
    assert end.error.error_class == "InvalidRequest"
    assert end.error.param == param
    (good,) = client.add([5, 6])
    await client.finished(good)
    assert client.handles[good].token_ids == expected_output([5, 6], 4)


async def test_a_prompt_that_can_never_fit_is_refused(stage: Stage) -> None:
    _, client = await stage.pair(FakeWorkerSpec(num_blocks=5))
    (handle,) = client.add(list(range(1, 100)))
    end = await client.finished(handle)
    assert end.error.error_class == "ContextLengthExceeded"


async def test_a_session_that_breaks_ends_its_handles_and_no_others(stage: Stage) -> None:
    worker, client = await stage.pair(FakeWorkerSpec(step_time_s=0.005))
    other = await stage.client()
    (lost,) = client.add([1, 2], LONG)
    (kept,) = other.add([3, 4], LONG)
    await client.tokens(lost, 2)
    await client.die()
    end = await other.finished(kept, timeout_s=60)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert other.handles[kept].token_ids == expected_output([3, 4], 200)
    assert stage.blocks_used() == 0
    assert worker.executor.num_rows <= 1, "only the row of the last request may still be there"


async def test_a_session_that_does_not_read_delays_nobody_and_is_closed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MERGE_AFTER_S", 0.1)
    monkeypatch.setattr(outbox, "CLOSE_AFTER_S", 4.0)
    _, client = await stage.pair(FakeWorkerSpec(step_time_s=0.001))
    slow = await stage.client()
    await slow.until_ready()
    (unread,) = slow.add([1, 2], LONG)
    await slow.tokens(unread, 1)
    slow.stop_reading()
    (read,) = client.add([3, 4], LONG)
    await client.finished(read, timeout_s=60)
    assert client.handles[read].token_ids == expected_output([3, 4], 200)
    slow.read_on()
    slow.acknowledges = False
    (unread,) = slow.add([1, 2], LONG)
    async with asyncio.timeout(60):
        await slow.ended.wait()
    assert slow.error is not None
    assert "acknowledged nothing" in (slow.error.details() or "")
    assert stage.blocks_used() == 0


async def test_frames_of_a_session_that_is_behind_are_merged(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MERGE_AFTER_S", 0.05)
    worker, client = await stage.pair(FakeWorkerSpec(step_time_s=0.005))
    client.acknowledges = False
    (handle,) = client.add([1, 2], LONG)
    await client.tokens(handle, 1)
    await worker.has_been_sent(150)
    client.acknowledges = True
    client.acknowledge_all()
    await client.finished(handle, timeout_s=60)
    assert client.handles[handle].token_ids == expected_output([1, 2], 200)
    assert max(len(frame.token_ids) for frame in client.frames) > 10


async def test_a_silent_session_is_dead(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "DEAD_AFTER_S", 1.0)
    _, client = await stage.pair()
    client.fall_silent()
    async with asyncio.timeout(60):
        await client.ended.wait()
    assert client.error is not None and "no frame" in (client.error.details() or "")


async def test_idle_streams_carry_heartbeats_with_every_engine(stage: Stage) -> None:
    _, client = await stage.pair()
    async with asyncio.timeout(60):
        while client.num_heartbeats < 3:
            client.changed.clear()
            await client.changed.wait()
    (engine,) = client.engines.values()
    assert engine.load.kv_blocks_total == 64
    assert engine.scheduler_address == stage.scheduler.address


async def test_a_worker_that_loads_is_seen_loading(stage: Stage) -> None:
    worker = await stage.worker(becomes_ready=False)
    client = await stage.client()
    worker.say_loading("weights", 0.25)
    async with asyncio.timeout(30):
        while not any(e.loading.fraction == 0.25 for e in client.engines.values()):
            client.changed.clear()
            await client.changed.wait()
    (handle,) = client.add([1, 2])
    end = await client.finished(handle)
    assert end.error.error_class == "Unavailable"
    worker.say_ready()
    await client.until_ready()
    (handle,) = client.add([1, 2])
    await client.finished(handle)
    assert client.handles[handle].token_ids == expected_output([1, 2], 4)


async def test_a_worker_may_leave_and_come_back_as_a_new_engine(stage: Stage) -> None:
    statuses = await watch_health(stage, "ready")
    worker, client = await stage.pair(FakeWorkerSpec(step_time_s=0.01))
    await expect(statuses, SERVING)
    (running,) = client.add([1, 2], LONG)
    await client.tokens(running, 2)
    await worker.die()
    end = await client.finished(running)
    assert end.error.error_class == "WorkerLost"
    await expect(statuses, NOT_SERVING)
    (refused,) = client.add([1, 2])
    end = await client.finished(refused)
    assert end.error.error_class == "Unavailable"
    assert end.error.retry_after_ms > 0
    back = await stage.worker()
    assert back.engine_id != worker.engine_id
    await expect(statuses, SERVING)
    await client.until_ready()
    (handle,) = client.add([1, 2])
    await client.finished(handle)
    assert client.handles[handle].token_ids == expected_output([1, 2], 4)
    assert [down.engine_id for down in client.downs] == [worker.engine_id]


async def test_a_request_goes_on_with_another_worker_when_its_own_dies(stage: Stage) -> None:
    worker, client = await stage.pair(FakeWorkerSpec(worker_id="a", step_time_s=0.01))
    (handle,) = client.add([1, 2], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    await client.tokens(handle, 3)
    await stage.worker(FakeWorkerSpec(worker_id="b"))
    await client.until_ready(2)
    await worker.die()
    end = await client.finished(handle)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert client.handles[handle].token_ids == expected_output([1, 2], 40)


async def test_a_frozen_worker_is_dead_and_its_stream_is_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "DEAD_AFTER_S", 1.0)
    worker, client = await stage.pair()
    worker.freeze()
    await client.until_ready(0, timeout_s=60)
    assert "no frame" in client.downs[0].reason
    worker.thaw()
    async with asyncio.timeout(60):
        await worker.ended.wait()
    assert worker.error is not None


async def test_a_second_hello_for_a_worker_ends_the_older_stream(stage: Stage) -> None:
    old, client = await stage.pair()
    new = await stage.worker()
    async with asyncio.timeout(30):
        await old.ended.wait()
        await new.welcomed.wait()
    assert old.error is not None and "attached again" in (old.error.details() or "")
    await client.until_sees_ready(new.engine_id)
    assert client.num_ready == 1
    (handle,) = client.add([1, 2])
    await client.finished(handle)
    assert new.steps


async def test_a_worker_of_another_protocol_is_refused_naming_both(stage: Stage) -> None:
    worker = await stage.worker(FakeWorkerSpec(protocol=99))
    async with asyncio.timeout(30):
        await worker.ended.wait()
    assert worker.welcome is not None
    assert "99" in worker.welcome.refused and "1" in worker.welcome.refused
    assert worker.error is not None
    assert worker.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_of_another_protocol_is_refused_naming_both(stage: Stage) -> None:
    client = await stage.client(protocol=99)
    async with asyncio.timeout(30):
        await client.ended.wait()
    assert client.error is not None
    assert "99" in translate(client.error).message


async def test_a_worker_for_another_tokenizer_gets_no_requests(stage: Stage) -> None:
    await stage.worker(FakeWorkerSpec(worker_id="other", text_fp="other-fp"))
    client = await stage.client(text_fp="text-fp")
    await client.until_ready()
    (handle,) = client.add([1, 2])
    end = await client.finished(handle)
    assert end.error.error_class == "Unavailable"
    assert "other-fp" in end.error.message and "text-fp" in end.error.message
    await stage.worker()
    await client.until_ready(2)
    (handle,) = client.add([1, 2])
    await client.finished(handle)
    assert client.handles[handle].token_ids == expected_output([1, 2], 4)


async def test_frames_that_break_the_protocol_end_that_stream_only(stage: Stage) -> None:
    _, client = await stage.pair()
    rude = await stage.client()
    rude.say(pb.ClientFrame(hello=pb.SessionHello(protocol=1)))
    async with asyncio.timeout(30):
        await rude.ended.wait()
    assert rude.error is not None
    assert rude.error.code() is grpc.StatusCode.INVALID_ARGUMENT
    rude_worker = await stage.worker(FakeWorkerSpec(worker_id="rude"), becomes_ready=False)
    rude_worker.say(worker_pb2.WorkerFrame(step_result=b"\xff\xff\xff"))
    async with asyncio.timeout(30):
        await rude_worker.ended.wait()
    (handle,) = client.add([1, 2])
    await client.finished(handle)
    assert client.handles[handle].token_ids == expected_output([1, 2], 4)


async def test_a_request_with_a_grammar_waits_for_it_and_others_do_not(stage: Stage) -> None:
    worker, client = await stage.pair()
    worker.may_prepare.clear()
    constraint = Constraint(ConstraintKind.REGEX, "a+")
    (waits,) = client.add([1, 2], constraint=constraint)
    (runs,) = client.add([3, 4])
    await client.finished(runs)
    assert client.handles[waits].token_ids == []
    worker.may_prepare.set()
    await client.finished(waits)
    (new,) = [row for step in worker.steps for row in step.new_requests if row.grammar_ref]
    assert new.grammar_ref == worker.prepares[0].ref
    (broken,) = client.add([1, 2], constraint=Constraint(ConstraintKind.REGEX, "broken"))
    end = await client.finished(broken)
    assert end.error.error_class == "InvalidRequest"


async def test_steps_overlap_so_that_the_worker_never_waits_for_a_round_trip(
    stage: Stage,
) -> None:
    worker, client = await stage.pair(FakeWorkerSpec(step_time_s=0.02))
    (handle,) = client.add([1, 2], LONG)
    await client.finished(handle, timeout_s=60)
    late = worker.num_steps_found_waiting
    assert late > 0.5 * len(worker.steps)
    assert worker.max_queued_steps <= 2


async def test_a_draining_worker_gets_leave_once_it_is_empty(stage: Stage) -> None:
    worker, client = await stage.pair(FakeWorkerSpec(step_time_s=0.01))
    (running,) = client.add([1, 2], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    await client.tokens(running, 1)
    stub = scheduler_pb2_grpc.SchedulerStub(await stage.channel())
    reply = await stub.Drain(common_pb2.DrainRequest(target="worker-0"))
    assert reply.engines_draining == 1
    (refused,) = client.add([3, 4])
    assert (await client.finished(refused)).error.error_class == "Unavailable"
    end = await client.finished(running)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    async with asyncio.timeout(30):
        await worker.drain_asked.wait()
        await worker.ended.wait()
    assert worker.error is None
    with pytest.raises(grpc.aio.AioRpcError, match="nobody"):
        await stub.Drain(common_pb2.DrainRequest(target="nobody"))


async def test_a_worker_that_wants_to_leave_is_drained(stage: Stage) -> None:
    worker, client = await stage.pair(FakeWorkerSpec(step_time_s=0.01))
    (running,) = client.add([1, 2], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    await client.tokens(running, 1)
    worker.say_drained()
    end = await client.finished(running)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    async with asyncio.timeout(30):
        await worker.ended.wait()
    assert worker.error is None


async def test_a_stopping_scheduler_lets_requests_finish(stage: Stage) -> None:
    _, client = await stage.pair(FakeWorkerSpec(step_time_s=0.01))
    (running,) = client.add([1, 2], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    await client.tokens(running, 1)
    await drain(stage.scheduler.fleet, timeout_s=60)
    end = await client.finished(running)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    (refused,) = client.add([3, 4])
    assert (await client.finished(refused)).error.error_class == "Unavailable"


async def test_what_a_drain_leaves_over_ends_with_an_error_to_resume_on(stage: Stage) -> None:
    worker, client = await stage.pair()
    worker.may_step.clear()
    (running,) = client.add([1, 2], LONG)
    await client.accepted(running)
    await drain(stage.scheduler.fleet, timeout_s=0.1)
    stage.scheduler.fleet.abandon_all("the scheduler stops")
    end = await client.finished(running)
    assert end.error.error_class == "WorkerLost"


async def test_stats_explain_and_reset_say_what_is(stage: Stage) -> None:
    worker, client = await stage.pair()
    stub = scheduler_pb2_grpc.SchedulerStub(await stage.channel())
    worker.may_step.clear()
    (handle,) = client.add(list(range(1, 20)), request_id="r-1")
    await client.accepted(handle)
    stats = await stub.Stats(pb.StatsRequest())
    assert (stats.num_sessions, stats.num_requests, len(stats.engines)) == (1, 1, 1)
    running = await stub.Explain(common_pb2.ExplainRequest(request_id="r-1"))
    assert (running.found, running.state) == (True, "queued")
    busy = await stub.ResetCache(common_pb2.ResetCacheRequest())
    assert (busy.engines_reset, busy.engines_busy) == (0, 1)
    worker.may_step.set()
    await client.finished(handle)
    ended = await stub.Explain(common_pb2.ExplainRequest(request_id="r-1"))
    assert ended.state == "finished"
    assert ended.lives[0].decision.chosen_engine_id == worker.engine_id
    assert not (await stub.Explain(common_pb2.ExplainRequest(request_id="r-2"))).found
    (warm,) = client.add(list(range(1, 20)))
    assert (await client.finished(warm)).usage.cached_tokens == 16
    reset = await stub.ResetCache(common_pb2.ResetCacheRequest())
    assert (reset.engines_reset, reset.engines_busy) == (1, 0)
    (cold,) = client.add(list(range(1, 20)))
    assert (await client.finished(cold)).usage.cached_tokens == 0


def test_the_service_can_be_asked_to_stop_before_anything_came() -> None:
    life = Lifecycle()
    life.stopping.set()

    async def main() -> None:
        async with asyncio.timeout(60):
            await serve(SchedulerConfig(port=0, http_port=0), life)

    asyncio.run(main())


@pytest.mark.parametrize(
    "scheduler_config",
    [
        SchedulerConfig(
            port=0,
            http_port=0,
            pipeline_depth=1,
            enable_prefix_caching=False,
            max_waiting=7,
            scheduling_policy="fcfs",
            step_time_target_ms=50,
        )
    ],
)
async def test_the_settings_hold_for_every_engine(stage: Stage) -> None:
    await stage.pair()
    (attachment,) = stage.scheduler.fleet.attachments()
    limits = attachment.running_engine().limits
    assert limits.pipeline_depth == 1
    assert not limits.enable_prefix_caching
    assert limits.max_waiting == 7
    assert limits.policy == "fcfs"
    assert limits.step_time_target_s == 0.05


async def test_what_happens_is_counted(stage: Stage) -> None:
    _, client = await stage.pair()
    (handle,) = client.add([1, 2])
    await client.finished(handle)
    text = generate_latest(REGISTRY).decode()
    assert 'sluiceway_scheduler_finished_total{reason="length"}' in text
    assert "sluiceway_scheduler_step_seconds_count" in text
