"""The engine in one process: what its callers may ask of it, on a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import InvalidRequest, Unavailable
from services.common.sampling import Constraint, ConstraintKind, SamplingParams
from services.offline import LLM, Job, LLMOptions
from services.scheduler.core.output import FinishReason
from services.tokenizer.bad_words import BadWordSpeller
from services.worker.runner.input_batch import InputBatch
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.step_input import Step
from services.worker.runner.step_output import StepOutput
from tests.tiny_models import make_tiny_model

RANDOM = SamplingParams(temperature=2.0, seed=5, max_tokens=8, ignore_eos=True)
GREEDY = replace(RANDOM, temperature=0.0)
PROMPT = [*range(10, 50)]


def schema(value: dict[str, Any]) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


PERSON = schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]+$", "minLength": 20, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("offline") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    # More rows than the budget has tokens: the smaller counts.
    options = LLMOptions(
        num_gpu_blocks_override=64, max_model_len=256, max_num_seqs=64, max_num_batched_tokens=32
    )
    with LLM(str(model_dir), options=options) as llm:
        yield llm


def test_prompts_are_texts_or_ids_and_come_back_in_order(llm: LLM) -> None:
    text, ids = llm.generate(["What is", PROMPT], GREEDY)
    assert ids.prompt_ids == PROMPT
    assert text.prompt_ids != PROMPT
    for output in (text, ids):
        (choice,) = output.choices
        assert len(choice.token_ids) == 8
        assert choice.finished.reason is FinishReason.LENGTH
        assert choice.finished.usage.output_tokens == 8
    assert llm.generate([PROMPT], GREEDY)[0].choices[0].token_ids == ids.choices[0].token_ids


def test_a_chat_is_rendered_by_the_models_template(llm: LLM) -> None:
    (chat,) = llm.chat([[{"role": "user", "content": "Hi"}]], GREEDY)
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (raw,) = llm.generate([rendered], GREEDY)
    assert chat.prompt_ids == raw.prompt_ids
    assert chat.choices[0].text == raw.choices[0].text


def test_choices_are_drawn_apart_and_again_the_same(llm: LLM) -> None:
    (first,) = llm.generate([PROMPT], RANDOM, n=3)
    drawn = [choice.token_ids for choice in first.choices]
    assert len({tuple(ids) for ids in drawn}) == 3
    (again,) = llm.generate([PROMPT], RANDOM, n=3)
    assert [choice.token_ids for choice in again.choices] == drawn


def test_without_a_seed_each_request_draws_anew(llm: LLM) -> None:
    unseeded = replace(RANDOM, seed=None)
    outputs = llm.generate([PROMPT, PROMPT], unseeded, n=2) + llm.generate([PROMPT], unseeded)
    drawn = [choice.token_ids for output in outputs for choice in output.choices]
    assert len({tuple(ids) for ids in drawn}) == 5


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate([PROMPT, PROMPT], [GREEDY, replace(GREEDY, max_tokens=3)])
    assert [len(output.choices[0].token_ids) for output in outputs] == [8, 3]
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate([PROMPT, PROMPT], [GREEDY])


@pytest.mark.parametrize("bad", [[], [320], [5] * 300], ids=["empty", "unknown id", "too long"])
def test_nothing_runs_if_one_prompt_cannot(llm: LLM, bad: list[int]) -> None:
    before = llm.load
    with pytest.raises(InvalidRequest):
        llm.generate([PROMPT, bad], GREEDY, n=2)
    assert (llm.load.waiting, llm.load.running) == (0, 0)
    llm.generate([PROMPT], GREEDY)
    assert llm.load.generated_tokens == before.generated_tokens + 8


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", float("nan")), ("max_tokens", -1), ("max_tokens", "5")]
)
def test_a_bad_parameter_is_refused_by_name_before_anything_runs(
    llm: LLM, field: str, value: Any
) -> None:
    before = llm.load
    with pytest.raises(InvalidRequest, match=f"^{field} must be .*, got {value!r}$"):
        llm.generate([PROMPT, PROMPT], [GREEDY, replace(GREEDY, **{field: value})])
    assert llm.load == before


@pytest.mark.parametrize(
    "bad",
    [[{"role": "user", "content": "Hi"}], [[]], ["Hi"], [["Hi"]], "Hi"],
    ids=["one chat", "no message", "a text", "a list of texts", "only a text"],
)
def test_what_is_no_list_of_chats_is_refused_with_the_way_to_mend_it(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^conversations\[0\] must .* given as \[chat\]$"):
        llm.chat(bad, GREEDY)


@pytest.mark.parametrize("bad", ["hello", None])
def test_what_is_no_list_of_prompts_is_refused_with_the_way_to_mend_it(llm: LLM, bad: Any) -> None:
    for ask in (llm.generate, llm.embed):
        with pytest.raises(InvalidRequest, match=r"^prompts must be .* given as \[prompt\]$"):
            ask(bad)


@pytest.mark.parametrize("bad", ["hello", ["hello"], Job(prompt="hello"), None])
def test_what_is_no_list_of_jobs_is_refused_with_the_way_to_mend_it(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^jobs must be a list of Job, as in run\("):
        llm.run(bad)


def test_a_closed_llm_says_that_it_is_closed(model_dir: Path) -> None:
    options = LLMOptions(num_gpu_blocks_override=64, max_model_len=256)
    with LLM(str(model_dir), options=options) as llm:
        pass
    with pytest.raises(Unavailable, match="this LLM is closed"):
        llm.chat([[{"role": "user", "content": "Hi"}]], GREEDY)


def test_a_request_that_breaks_its_steps_ends_alone_and_the_others_go_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[first, *PROMPT] for first in range(60, 66)]
    expected = [output.choices[0].token_ids for output in llm.generate(prompts, GREEDY)]
    execute = ModelRunner.execute

    def fragile(runner: ModelRunner, step: Step) -> StepOutput:
        if any(63 in new.token_ids for new in step.new_rows):
            raise ValueError("63")
        return execute(runner, step)

    monkeypatch.setattr(ModelRunner, "execute", fragile)
    outputs = llm.generate(prompts, GREEDY)
    (broken,) = outputs.pop(3).choices
    del expected[3]
    assert broken.finished.reason is FinishReason.ERROR
    assert "ValueError: 63" in str(broken.finished.error)
    assert [output.choices[0].token_ids for output in outputs] == expected


def test_a_choice_that_ended_with_an_error_says_which(llm: LLM) -> None:
    contradiction = SamplingParams(
        max_tokens=5, min_tokens=5, allowed_token_ids=llm.facts.eos_token_ids
    )
    (output,) = llm.generate([PROMPT], contradiction)
    (choice,) = output.choices
    assert (choice.text, choice.finished.reason) == ("", FinishReason.ERROR)
    assert "no token is left" in str(choice.finished.error)


def test_a_row_with_nan_ends_alone_and_whoever_hit_its_blocks_in_the_same_step_is_right(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [*range(100, 116)]
    bad, good = [*shared, 63], [*shared, 64]
    assert llm.reset_prefix_cache()
    (expected,) = llm.generate([good], GREEDY)
    assert llm.reset_prefix_cache()
    run = ModelRunner._run

    def poisoned(runner: ModelRunner, batch: InputBatch) -> Any:
        samples, *rest = run(runner, batch)
        starts = batch.query_start_loc
        for index in range(len(batch.rows)):
            tokens = slice(starts[index], starts[index + 1])
            if 63 not in batch.input_ids[tokens] or samples is None:
                continue
            blocks = torch.div(batch.attention.slot_mapping[tokens], 16, rounding_mode="floor")
            for cache in runner._kv_caches:
                cache[:, blocks] = torch.nan
            samples.sampled.scores[list(batch.sampling_index).index(index)] = torch.nan
        return samples, *rest

    monkeypatch.setattr(ModelRunner, "_run", poisoned)
    first, second = llm.generate([bad, good], GREEDY)
    assert first.choices[0].finished.reason is FinishReason.ERROR
    assert "nan" in str(first.choices[0].finished.error)
    assert second.choices[0].token_ids == expected.choices[0].token_ids
    assert second.choices[0].finished.life.num_preemptions == 1


def test_a_constraint_holds_for_every_choice_also_after_preemption(llm: LLM) -> None:
    before = llm.load.preemptions
    wild = SamplingParams(temperature=3.0, seed=1, max_tokens=180, min_tokens=170, ignore_eos=True)
    prompts = [[*range(10, 60), first] for first in range(8)]
    outputs = llm.generate(prompts, replace(wild, logprobs=2), n=2, constraint=PERSON)
    assert llm.load.preemptions > before
    for choice in (choice for output in outputs for choice in output.choices):
        assert choice.finished.reason is FinishReason.STOP
        person = json.loads(choice.text)
        assert set(person) == {"name", "age"}
        assert re.fullmatch("[a-z]{20,40}", person["name"])
        assert 0 <= person["age"] <= 120


def test_a_constraint_that_cannot_be_enforced_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        llm.generate([PROMPT], GREEDY, constraint=schema({"type": "array", "uniqueItems": True}))


def test_jobs_may_each_ask_for_something_else(llm: LLM) -> None:
    yes_or_no = Constraint(ConstraintKind.CHOICE, '["yes", "no"]')
    plain, several, constrained = llm.run(
        [
            Job(prompt=PROMPT, params=GREEDY),
            Job(prompt=PROMPT, params=RANDOM, n=2),
            Job(prompt="What is", params=SamplingParams(seed=1), constraint=yes_or_no),
        ]
    )
    (alone,) = llm.generate([PROMPT], GREEDY)
    assert plain.choices[0].token_ids == alone.choices[0].token_ids
    expected = llm.generate([PROMPT], RANDOM, n=2)[0].choices
    assert [c.token_ids for c in several.choices] == [c.token_ids for c in expected]
    assert constrained.choices[0].text in {"yes", "no"}
    with pytest.raises(InvalidRequest, match="n must be at least 1"):
        llm.run([Job(prompt=PROMPT, n=0)])


def test_a_choice_ends_where_the_caller_says(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPT], RANDOM, n=2)
    (cut,) = llm.run(
        [Job(prompt=PROMPT, params=RANDOM, n=2)],
        ends_here=lambda job, choice, output: (job, choice, len(output)) == (0, 1, 3),
    )
    assert cut.choices[0].token_ids == whole.choices[0].token_ids
    assert cut.choices[1].token_ids == whole.choices[1].token_ids[:3]
    assert cut.choices[1].finished.reason is FinishReason.STOP


def test_logprobs_are_given_where_they_are_asked_for(llm: LLM) -> None:
    asking = replace(RANDOM, logprobs=2, prompt_logprobs=0)
    told, silent = llm.generate([PROMPT, PROMPT], [asking, RANDOM], n=2)
    assert told.prompt_logprobs is not None
    assert (told.prompt_logprobs.start, told.prompt_logprobs.token_ids) == (1, PROMPT[1:])
    for choice in told.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.positions == [*range(8)]
        assert choice.logprobs.num_top == [2] * 8
    assert silent.prompt_logprobs is None
    assert all(choice.logprobs is None for choice in silent.choices)


def test_a_bad_word_never_comes_out_however_it_is_tokenised(llm: LLM) -> None:
    encoder = llm._encoder
    pieces = {b"n", b"i", b"e", b"ne", b"ine"}  # wherever "nine" stands, it begins with a token
    shown = encoder.token_bytes.shown
    allowed = tuple(token_id for token_id, raw in enumerate(shown) if raw in pieces)
    assert len(allowed) == len(pieces)
    free = SamplingParams(
        temperature=9.0, max_tokens=200, ignore_eos=True, allowed_token_ids=allowed, seed=1
    )
    banned = replace(free, bad_words=BadWordSpeller(encoder).spell(["nine"]))
    without, within = llm.generate(["x", "x"], [free, banned], n=8)
    assert any("nine" in choice.text for choice in without.choices)
    assert not any("nine" in choice.text for choice in within.choices)


def test_jobs_of_another_namespace_do_not_share_blocks(llm: LLM) -> None:
    def cached(namespace: str) -> int:
        (output,) = llm.run([Job(prompt=PROMPT, params=GREEDY, cache_namespace=namespace)])
        return output.choices[0].finished.usage.cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 32, 0]


def test_progress_is_drawn_when_asked_for_and_counts_choices(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate([PROMPT], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate([PROMPT, PROMPT], GREEDY, n=2, show_progress=True)
    assert "4/4 choices" in capsys.readouterr().err
