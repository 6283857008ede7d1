"""A Session with a fake scheduler: handles, acknowledgements, silence, gaps, death, redial."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from services.common.errors import WorkerLost
from services.common.fingerprint import text_fingerprint
from services.common.pb import common_pb2, scheduler_pb2, tokenizer_pb2
from services.common.rpc import translate
from services.tokenizer import service
from tests.fakes import scheduler
from tests.fakes.scheduler import Answer, FakeScheduler, engine_state
from tests.unit.tokenizer.conftest import MODEL, MakeRig, Rig, rig_of, until_ready

Call = grpc.aio.UnaryStreamCall[tokenizer_pb2.GenerateRequest, tokenizer_pb2.TextDelta]
ENDLESS = Answer([65] * 100, is_endless=True)


def request(request_id: str = "r", **fields: object) -> tokenizer_pb2.GenerateRequest:
    key = common_pb2.RequestKey(request_id=request_id)
    return tokenizer_pb2.GenerateRequest(model=MODEL, text="hello", key=key, **fields)  # type: ignore[arg-type]


async def first_of(rig: Rig, **fields: object) -> Call:
    """Start a request and read until it is admitted."""
    call = rig.stub.Generate(request(**fields))
    assert (await call.read()).has_prompt
    return call


async def test_the_hello_names_protocol_session_and_fingerprint(
    make_rig: MakeRig, model_dir: Path
) -> None:
    async with make_rig(lambda add, index: ENDLESS) as rig:
        await rig.fake.until(lambda: bool(rig.fake.hellos))
        (hello,) = rig.fake.hellos
        assert hello.protocol == 1
        assert hello.session_id
        assert hello.text_fp == text_fingerprint(model_dir)


async def test_handles_are_never_used_twice(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65, 66])) as rig:
        for _ in range(3):
            async for _delta in rig.stub.Generate(request(n=2)):
                pass
        handles = [choice.handle for add in rig.fake.adds for choice in add.choices]
        assert len(handles) == len(set(handles)) == 6


async def test_frames_are_acknowledged_by_number_and_by_time(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65] * 100)) as rig:
        async for _ in rig.stub.Generate(request()):
            pass
        # 32 at the latest while they stream, and the rest once time has passed.
        await rig.fake.until(
            lambda: bool(rig.fake.acks) and rig.fake.acks[-1] == rig.fake.num_frames
        )
        assert rig.fake.acks[0] <= 32
        assert rig.fake.acks == sorted(rig.fake.acks)


async def test_an_idle_session_sends_heartbeats(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: ENDLESS) as rig:
        await rig.fake.until(lambda: rig.fake.num_client_heartbeats >= 2)


async def test_leaving_a_request_aborts_it_and_forgets_it_only_at_its_end(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: ENDLESS, step_s=0.01) as rig:
        call = await first_of(rig)
        call.cancel()
        await rig.fake.until(lambda: bool(rig.fake.aborts))
        assert rig.fake.aborts[0].reason == scheduler_pb2.ABORT_REASON_CLIENT_GONE
        (session,) = rig.schedulers.sessions
        while session.num_handles:
            await rig.schedulers.changed.wait(timeout_s=1)


async def test_that_an_engine_has_nothing_left_to_do_is_told_at_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "INFO_PERIOD_S", 600.0)
    monkeypatch.setattr(scheduler, "HEARTBEAT_S", 600.0)
    async with make_rig(lambda add, index: Answer([65, 66, 67])) as rig:
        watching = rig.stub.Info(tokenizer_pb2.InfoRequest())
        before = (await watching.read()).engines[0].load
        assert (before.running, before.generated_tokens) == (0, 0)
        async for _ in rig.stub.Generate(request()):
            pass
        async with asyncio.timeout(60):
            while not (load := (await watching.read()).engines[0].load).generated_tokens:
                pass
            while load.running:
                load = (await watching.read()).engines[0].load


async def test_that_an_engine_has_something_to_do_is_told_at_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "INFO_PERIOD_S", 600.0)
    monkeypatch.setattr(scheduler, "HEARTBEAT_S", 600.0)
    async with make_rig(lambda add, index: ENDLESS, step_s=0.01) as rig:
        watching = rig.stub.Info(tokenizer_pb2.InfoRequest())
        assert (await watching.read()).engines[0].load.running == 0
        call = await first_of(rig)
        async with asyncio.timeout(60):
            while not (await watching.read()).engines[0].load.running:
                pass
        call.cancel()


async def test_a_gap_in_the_offsets_fails_the_session(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: ENDLESS, step_s=0.01) as rig:
        call = await first_of(rig)
        rig.fake.drop_next_token = True
        finish = await finish_of(call)
        assert finish.error.error_class == "WorkerLost"
        await rig.fake.until(lambda: len(rig.fake.hellos) == 2)


async def test_a_frame_that_makes_no_sense_fails_its_session_alone(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: ENDLESS, step_s=0.01) as rig:
        call = await first_of(rig)
        rig.fake.garble_next_step = True
        finish = await finish_of(call)
        assert finish.error.error_class == "WorkerLost"
        await rig.fake.until(lambda: len(rig.fake.hellos) == 2)


async def test_a_silent_scheduler_counts_as_dead_and_its_requests_are_lost(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: ENDLESS, step_s=0.01, silence_s=1.0) as rig:
        call = await first_of(rig)
        rig.fake.is_silent = True
        finish = await finish_of(call)
        assert finish.error.error_class == "WorkerLost"
        assert "no worker" in rig.service.not_ready_reason()


async def test_a_dead_scheduler_ends_every_handle_and_is_dialled_again(model_dir: Path) -> None:
    def make_fake() -> FakeScheduler:
        engine = engine_state(text_fp=text_fingerprint(model_dir))
        return FakeScheduler(lambda add, index: ENDLESS, [engine], step_s=0.01)

    first, second = make_fake(), make_fake()
    async with first.serving() as address, rig_of(model_dir, [first], addresses=[address]) as rig:
        await until_ready(rig)
        calls = [await first_of(rig, request_id=str(i), n=2) for i in range(3)]
        await first.kill()
        ends = [await ends_of(call) for call in calls]
        assert all(set(end) == {0, 1} for end in ends)
        assert all(e.error.error_class == "WorkerLost" for end in ends for e in end.values())
        await until_ready(rig, ready=False)
        async with second.serving(port=int(address.rpartition(":")[2])):
            await until_ready(rig)
            await first_of(rig)


async def test_before_admission_a_loss_is_an_error_of_the_call(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: ENDLESS, accepts=False) as rig:
        call = rig.stub.Generate(request())
        await rig.fake.until(lambda: bool(rig.fake.adds))
        await rig.fake.kill()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert isinstance(translate(raised.value), WorkerLost)


async def finish_of(call: Call) -> tokenizer_pb2.Finish:
    return (await ends_of(call))[0]


async def ends_of(call: Call) -> dict[int, tokenizer_pb2.Finish]:
    """Index → finish; each choice must end once."""
    ends: dict[int, tokenizer_pb2.Finish] = {}
    async with asyncio.timeout(120):
        while (delta := await call.read()) is not grpc.aio.EOF:
            for choice in delta.choices:
                if choice.HasField("finish"):
                    assert choice.index not in ends
                    ends[choice.index] = choice.finish
    return ends
