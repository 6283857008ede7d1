"""The Tokenizer service over gRPC, before a fake scheduler."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    SluicewayError,
    Unavailable,
)
from services.common.fingerprint import text_fingerprint
from services.common.pb import common_pb2, scheduler_pb2, tokenizer_pb2
from services.common.rpc import translate
from services.tokenizer.encode import Encoder
from tests.fakes.scheduler import Answer, FakeScheduler, engine_state
from tests.unit.tokenizer.conftest import MODEL, MakeRig, Rig, rig_of, until_ready

HI = json.dumps([{"role": "user", "content": "hello"}])
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
ENDLESS = Answer([65] * 200, is_endless=True)
Call = grpc.aio.UnaryStreamCall[tokenizer_pb2.GenerateRequest, tokenizer_pb2.TextDelta]


def request(**fields: object) -> tokenizer_pb2.GenerateRequest:
    key = common_pb2.RequestKey(request_id="r1")
    return tokenizer_pb2.GenerateRequest(**{"model": MODEL, "key": key, **fields})  # type: ignore[arg-type]


def sampling(**fields: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)  # type: ignore[arg-type]


async def generate(rig: Rig, **fields: object) -> list[tokenizer_pb2.TextDelta]:
    async with asyncio.timeout(120):
        return [delta async for delta in rig.stub.Generate(request(**fields))]


async def refusal(rig: Rig, **fields: object) -> SluicewayError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(rig, **fields)
    return translate(raised.value)


def text_of(deltas: list[tokenizer_pb2.TextDelta], index: int = 0) -> str:
    return "".join(c.text for d in deltas for c in d.choices if c.index == index)


def finish_of(deltas: list[tokenizer_pb2.TextDelta], index: int = 0) -> tokenizer_pb2.Finish:
    choices = [c for d in deltas for c in d.choices if c.index == index]
    (finish,) = [c.finish for c in choices if c.HasField("finish")]
    return finish


async def test_a_chat_is_rendered_and_its_special_tokens_are_not_added_twice(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        deltas = await generate(rig, chat=tokenizer_pb2.ChatPrompt(messages_json=HI))
        assert list(deltas[0].prompt_ids) == rig.ids(RENDERED)
        assert list(rig.fake.adds[0].prompt_ids) == rig.ids(RENDERED)
        reply = await rig.stub.Render(
            tokenizer_pb2.RenderRequest(chat=tokenizer_pb2.ChatPrompt(messages_json=HI))
        )
        assert (reply.text, list(reply.ids)) == (RENDERED, rig.ids(RENDERED))


async def test_token_ids_go_through_as_they_are(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        deltas = await generate(rig, ids=common_pb2.TokenIds(ids=[5, 6, 7]))
        assert list(deltas[0].prompt_ids) == list(rig.fake.adds[0].prompt_ids) == [5, 6, 7]


async def test_a_stop_string_is_told_to_the_scheduler_with_the_tokens_that_are_kept(
    make_rig: MakeRig, model_dir: Path
) -> None:
    script: list[int] = []
    answer = lambda add, index: Answer(script, is_endless=True)  # noqa: E731
    async with make_rig(answer, step_s=0.01) as rig:
        kept = rig.ids("hello the end")
        script += kept + rig.ids(" comes soon") * 20
        deltas = await generate(rig, text="x", stop=["zzz", "the end"])
        (abort,) = rig.fake.aborts
        assert abort.reason == scheduler_pb2.ABORT_REASON_STOP_STRING
        assert list(abort.kept_tokens) == [len(kept)]
    assert text_of(deltas) == "hello "
    finish = finish_of(deltas)
    assert finish.reason == common_pb2.FINISH_REASON_STOP
    assert finish.stop_string == "the end"
    assert finish.usage.output_tokens == len(kept)
    assert sum(len(c.token_ids) for d in deltas for c in d.choices) == len(kept)


async def test_n_choices_are_one_add_and_end_separately(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65 + index] * (index + 1))) as rig:
        deltas = await generate(rig, text="x", n=3)
        (add,) = rig.fake.adds
        assert [choice.index for choice in add.choices] == [0, 1, 2]
        for index in range(3):
            assert finish_of(deltas, index).usage.output_tokens == index + 1


async def test_logprobs_carry_the_exact_bytes_of_parts_of_characters(make_rig: MakeRig) -> None:
    script: list[int] = []
    async with make_rig(lambda add, index: Answer(script, top_logprobs=2)) as rig:
        script += rig.ids("🌶a")
        deltas = await generate(rig, text="x", sampling=sampling(logprobs=2))
    choices = [c for d in deltas for c in d.choices]
    assert b"".join(raw for c in choices for raw in c.logprob_token_bytes) == "🌶a".encode()
    for choice in choices:
        rows = choice.logprobs
        assert list(rows.position) == list(range(len(choice.token_ids)))
        assert len(choice.top_token_bytes) == len(rows.top_ids) == 2 * len(rows.position)


async def test_prompt_logprobs_pass_through_in_order(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65], prompt_logprobs=True)) as rig:
        deltas = await generate(rig, text="hello world")
        ids = rig.ids("hello world")
    parts = [d for d in deltas if d.HasField("prompt_logprobs")]
    assert parts[0].prompt_logprobs.start == 1
    assert [i for d in parts for i in d.prompt_logprobs.token_ids] == ids[1:]
    first_token = len(rig.encoder.token_bytes.shown[ids[0]])
    raw = b"".join(raw for d in parts for raw in d.prompt_token_bytes)
    assert raw == b"hello world"[first_token:]


async def test_a_client_that_cancels_frees_its_request_at_once(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: ENDLESS, step_s=0.02) as rig:
        call = rig.stub.Generate(request(text="x"))
        await call.read()
        call.cancel()
        await rig.fake.until(lambda: bool(rig.fake.aborts))
        assert rig.fake.aborts[0].reason == scheduler_pb2.ABORT_REASON_CLIENT_GONE


async def test_a_client_that_cancels_before_admission_frees_its_request(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: ENDLESS, accepts=False) as rig:
        call = rig.stub.Generate(request(text="x"))
        await rig.fake.until(lambda: bool(rig.fake.adds))
        call.cancel()
        await rig.fake.until(lambda: bool(rig.fake.aborts))


async def test_a_deadline_ends_a_request_even_if_the_scheduler_does_not_see_to_it(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: ENDLESS, step_s=0.02) as rig:
        deltas = await generate(rig, text="x", deadline_ms=300)
        assert rig.fake.aborts[0].reason == scheduler_pb2.ABORT_REASON_DEADLINE
        assert 0 < rig.fake.adds[0].deadline_ms <= 300
        assert isinstance(await refusal(rig, text="x", deadline_ms=0), DeadlineExceeded)
    assert finish_of(deltas).error.error_class == "DeadlineExceeded"


async def test_the_schedulers_refusal_is_the_calls_error(make_rig: MakeRig) -> None:
    full = Overloaded("the queue is full", retry_after_s=3)
    async with make_rig(lambda add, index: Answer(refusal=full)) as rig:
        error = await refusal(rig, text="x", n=2)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 3


async def test_an_error_after_admission_is_the_choices_finish(make_rig: MakeRig) -> None:
    from services.common.errors import RequestFailed

    async with make_rig(lambda add, index: Answer([65], error=RequestFailed("NaN"))) as rig:
        finish = finish_of(await generate(rig, text="x"))
    assert finish.reason == common_pb2.FINISH_REASON_ERROR
    assert finish.error.error_class == "RequestFailed"


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"text": "x", "model": "other"}, ModelNotFound, "model"),
        ({"text": ""}, InvalidRequest, "prompt"),
        ({}, InvalidRequest, "prompt"),
        ({"ids": common_pb2.TokenIds(ids=[100_000])}, InvalidRequest, "prompt"),
        ({"ids": common_pb2.TokenIds()}, InvalidRequest, "prompt"),
        ({"text": "x", "n": 0}, InvalidRequest, "n"),
        ({"text": "x", "stop": [""]}, InvalidRequest, "stop"),
        ({"text": "x", "sampling": sampling(top_p=0)}, InvalidRequest, "top_p"),
        ({"text": "x", "sampling": sampling(max_tokens=256)}, ContextLengthExceeded, "max_tokens"),
        ({"ids": common_pb2.TokenIds(ids=[5] * 256)}, ContextLengthExceeded, "prompt"),
        ({"chat": tokenizer_pb2.ChatPrompt(messages_json="[]")}, InvalidRequest, "messages"),
        (
            {"chat": tokenizer_pb2.ChatPrompt(messages_json=HI, chat_template="x")},
            InvalidRequest,
            "chat_template",
        ),
        (
            {
                "chat": tokenizer_pb2.ChatPrompt(
                    messages_json='[{"role":"user","content":"\\ud83d"}]'
                )
            },
            InvalidRequest,
            "messages",
        ),
    ],
)
async def test_a_bad_request_is_refused_by_name_and_the_next_is_served(
    make_rig: MakeRig, fields: dict[str, object], kind: type[SluicewayError], param: str
) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        error = await refusal(rig, **fields)
        assert type(error) is kind
        assert error.param == param
        assert not rig.fake.adds
        assert finish_of(await generate(rig, text="x"))


async def test_a_text_that_is_far_too_long_is_refused_without_being_encoded(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_too_long = "word " * 200_000
    messages = json.dumps([{"role": "user", "content": far_too_long}])
    async with make_rig(lambda add, index: Answer([65])) as rig:
        monkeypatch.delattr(Encoder, "encode_now")
        for fields, param in (
            ({"text": far_too_long}, "prompt"),
            ({"chat": tokenizer_pb2.ChatPrompt(messages_json=messages)}, "messages"),
        ):
            error = await refusal(rig, **fields)
            assert isinstance(error, ContextLengthExceeded)
            assert error.param == param
            assert "characters" in str(error)


async def test_max_tokens_is_the_rest_of_the_context_by_default(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        await generate(rig, ids=common_pb2.TokenIds(ids=[5] * 56))
        assert rig.fake.adds[0].sampling.max_tokens == 200


async def test_bad_words_and_truncation_reach_the_scheduler_as_tokens(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        await generate(rig, text="one two three", truncate_prompt_tokens=2, bad_words=["stop"])
        (add,) = rig.fake.adds
        assert list(add.prompt_ids) == rig.ids("one two three")[-2:]
        bare, spaced = add.sampling.bad_words
        assert set(rig.ids("stop")) <= set(bare.token_ids)
        assert set(rig.ids(" stop")) <= set(spaced.token_ids)


async def test_a_resumed_request_is_not_rendered_again_and_goes_on_where_it_was(
    make_rig: MakeRig,
) -> None:
    script: list[int] = []
    async with make_rig(lambda add, index: Answer(script)) as rig:
        script += rig.ids("hello world, how are you")
        done = rig.ids("hello world")
        resume = tokenizer_pb2.Resume(prompt_ids=[5, 6])
        resume.choices.add(index=0, token_ids=done, num_chars=8)
        resume.choices.add(index=1, token_ids=script, finished=True)
        deltas = await generate(rig, n=2, resume=resume)
        (choice,) = rig.fake.adds[0].choices
        assert list(rig.fake.adds[0].prompt_ids) == [5, 6]
        assert list(choice.resume_ids) == done
    assert text_of(deltas) == "hello world, how are you"[8:]
    assert not [c for d in deltas for c in d.choices if c.index == 1]


async def test_a_resumed_request_that_had_stopped_is_finished_without_a_scheduler(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        resume = tokenizer_pb2.Resume(prompt_ids=[5, 6])
        resume.choices.add(index=0, token_ids=rig.ids("hello world"), num_chars=2)
        deltas = await generate(rig, resume=resume, stop=[" wor"])
        assert not rig.fake.adds
    assert text_of(deltas) == "llo"
    assert finish_of(deltas).stop_string == " wor"


async def test_a_fingerprint_that_does_not_match_is_not_ready_and_names_both(
    model_dir: Path,
) -> None:
    fake = FakeScheduler(lambda add, index: ENDLESS, [engine_state(text_fp="theirs")])
    async with fake.serving() as address, rig_of(model_dir, [fake], addresses=[address]) as rig:
        while not rig.schedulers.sessions:
            await rig.schedulers.changed.wait(timeout_s=5)
        error = await refusal(rig, text="x")
        assert isinstance(error, Unavailable)
        for value in ("theirs", text_fingerprint(model_dir)):
            assert value in error.message
            assert value in rig.service.not_ready_reason()


async def test_without_a_scheduler_requests_are_refused_with_a_retry(model_dir: Path) -> None:
    async with rig_of(model_dir, [], addresses=["127.0.0.1:1"]) as rig:
        error = await refusal(rig, text="x")
        assert isinstance(error, Unavailable)
        assert error.retry_after_s


async def test_info_tells_at_once_and_on_change(make_rig: MakeRig, model_dir: Path) -> None:
    async with make_rig(lambda add, index: ENDLESS) as rig:
        infos = rig.stub.Info(tokenizer_pb2.InfoRequest())
        info = await infos.read()
        assert (info.model, info.ready, info.max_model_len) == (MODEL, True, 256)
        assert info.engines[0].scheduler_address == rig.fake.address
        loading = engine_state(text_fp="x", phase=common_pb2.ENGINE_PHASE_LOADING)
        loading.loading.fraction = 0.25
        rig.fake.engines[:] = [loading]
        await rig.fake.announce()
        while info.ready:
            info = await infos.read()
        assert info.engines[0].loading.fraction == 0.25
        infos.cancel()


async def test_two_schedulers_share_the_requests_by_load(model_dir: Path) -> None:
    text_fp = text_fingerprint(model_dir)
    busy = engine_state(text_fp=text_fp, engine_id=1, running=0, waiting_uncached_tokens=9000)
    idle = engine_state(text_fp=text_fp, engine_id=2)
    fakes = [FakeScheduler(lambda add, index: Answer([65]), [state]) for state in (busy, idle)]
    async with (
        fakes[0].serving() as first,
        fakes[1].serving() as second,
        rig_of(model_dir, fakes, addresses=[first, second]) as rig,
    ):
        while len(rig.schedulers.sessions) < 2:
            await rig.schedulers.changed.wait(timeout_s=5)
        await generate(rig, text="hello world, how are you")
        assert (len(fakes[0].adds), len(fakes[1].adds)) == (0, 1)
        assert fakes[1].adds[0].prediction.engine_id == 2


async def test_side_calls_are_passed_to_every_scheduler(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        await generate(rig, text="x")
        explained = await rig.stub.Explain(common_pb2.ExplainRequest(request_id="r1"))
        assert explained.found
        unknown = await rig.stub.Explain(common_pb2.ExplainRequest(request_id="r2"))
        assert not unknown.found
        reset = await rig.stub.ResetCache(common_pb2.ResetCacheRequest())
        assert reset.engines_reset == 1
        drained = await rig.stub.Drain(common_pb2.DrainRequest())
        assert drained.engines_draining == 1


async def test_tokenize_and_detokenize_are_inverse(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65])) as rig:
        reply = await rig.stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="hello 🌶<|im_end|>"))
        assert list(reply.ids) == rig.ids("hello 🌶<|im_end|>")
        assert len(reply.tokens) == len(reply.ids)
        ids = tokenizer_pb2.DetokenizeRequest(ids=reply.ids)
        assert (await rig.stub.Detokenize(ids)).text == "hello 🌶<|im_end|>"
        ids.skip_special_tokens = True
        assert (await rig.stub.Detokenize(ids)).text == "hello 🌶"


async def test_a_stopping_service_takes_nothing_new_and_finishes_what_it_has(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: Answer([65] * 30), step_s=0.02) as rig:
        call = rig.stub.Generate(request(text="x"))
        await call.read()
        rig.life.stopping.set()
        assert isinstance(await refusal(rig, text="x"), Unavailable)
        deltas = await _read_all(call)
    assert finish_of(deltas).usage.output_tokens == 30


async def _read_all(call: Call) -> list[tokenizer_pb2.TextDelta]:
    deltas = []
    while (delta := await call.read()) is not grpc.aio.EOF:
        deltas.append(delta)
    return deltas


async def test_a_stopping_service_waits_for_requests_and_not_for_those_that_only_watch(
    make_rig: MakeRig,
) -> None:
    async with make_rig(lambda add, index: Answer([65] * 30), step_s=0.02) as rig:
        watching = rig.stub.Info(tokenizer_pb2.InfoRequest())
        await watching.read()
        call = rig.stub.Generate(request(text="x"))
        await call.read()
        rig.life.stopping.set()
        reading = asyncio.ensure_future(_read_all(call))
        await rig.service.run_out(timeout_s=120)
        assert finish_of(await reading).usage.output_tokens == 30
        await rig.service.run_out(timeout_s=120)


async def test_a_slow_reader_gets_merged_deltas_and_delays_nobody(make_rig: MakeRig) -> None:
    async with make_rig(lambda add, index: Answer([65] * 200)) as rig:
        slow = rig.stub.Generate(request(text="x"))
        assert finish_of(await generate(rig, text="x"))
        deltas = [delta async for delta in slow]
    tokens = [i for d in deltas for c in d.choices for i in c.token_ids]
    assert len(tokens) == 200


async def test_ready_is_told_only_with_an_engine(model_dir: Path) -> None:
    engine = engine_state(text_fp=text_fingerprint(model_dir))
    fake = FakeScheduler(lambda add, index: ENDLESS, [engine])
    async with fake.serving() as address, rig_of(model_dir, [fake], addresses=[address]) as rig:
        await until_ready(rig)
        fake.engines.clear()
        await fake.announce()
        await until_ready(rig, ready=False)
