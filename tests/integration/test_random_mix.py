"""Random mixes of everything that a request may ask for, in a pool too small for them all.

Whatever shares its batch, whenever it is preempted and however deep the pipeline is, a request gets
the tokens that it gets alone (float32), and every promise of its parameters is kept.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.common.sampling import (
    BadWord,
    Constraint,
    ConstraintKind,
    RepetitionDetection,
    SamplingParams,
)
from services.offline import LLM, Choice, Job, LLMOptions, Output
from services.scheduler.core.output import FinishReason
from services.scheduler.core.stop import REPETITION_DETECTED
from tests.tiny_models import EOS_TOKEN_ID, make_tiny_model
from tests.unit.scheduler.core.invariants import check_scheduler

pytestmark = pytest.mark.slow

NUM_MIXES = 8
TOLERANCE = 1e-3  # of log-probabilities: other batch shapes round otherwise
STEM = [*range(20, 60)]
STOP_IDS = (70, 71, 72, 73)
ALLOWED_IDS = tuple(range(60, 140))
BAD_WORDS = ((90,), (64, 65), (100, 101, 102))
CONTRADICTION = SamplingParams(
    allowed_token_ids=(5,), bad_words=(BadWord.of_tokens(5),), max_tokens=4
)
"""Every token is banned: such a request ends with an error and hurts nobody."""

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[Constraint, Callable[[str], bool]] = {
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(POINT)): (
        lambda text: 0 <= json.loads(text)["x"] <= 99
    ),
    Constraint(ConstraintKind.REGEX, r"[0-9]{3,8}-(x|yy)"): (
        lambda text: re.fullmatch(r"[0-9]{3,8}-(x|yy)", text) is not None
    ),
    Constraint(ConstraintKind.CHOICE, '["yes", "no", "who knows"]'): (
        lambda text: text in {"yes", "no", "who knows"}
    ),
}

ALONE = LLMOptions(
    dtype="float32",
    block_size=4,
    num_gpu_blocks_override=200,
    max_model_len=128,
    max_num_seqs=1,
    pipeline_depth=1,
    enable_prefix_caching=False,
    scheduling_policy="priority",
)


def crowded(pipeline_depth: int) -> LLMOptions:
    """Prompts come in chunks, requests wait, and their outputs do not fit all at once."""
    return LLMOptions(
        dtype="float32",
        block_size=4,
        num_gpu_blocks_override=36,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=20,
        pipeline_depth=pipeline_depth,
        scheduling_policy="priority",
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("mix") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), options=ALONE) as llm:
        yield llm


@dataclass(frozen=True)
class Mix:
    """Requests that run together.

    Attributes:
        jobs: The requests.
        ends: (job, choice) → number of tokens after which it is ended from outside.
    """

    jobs: list[Job]
    ends: Mapping[tuple[int, int], int]


def free_params(draw: random.Random) -> SamplingParams:
    """Any parameters of a request without a constraint."""
    max_tokens = draw.randint(1, 16)
    return SamplingParams(
        temperature=draw.choice([0.0, 0.6, 1.5]),
        top_p=draw.choice([1.0, 0.8]),
        top_k=draw.choice([0, 1, 20]),
        min_p=draw.choice([0.0, 0.05]),
        seed=draw.randint(-9, 9),
        max_tokens=max_tokens,
        min_tokens=draw.choice([0, min(5, max_tokens)]),
        ignore_eos=draw.choice([True, False]),
        stop_token_ids=draw.choice([(), STOP_IDS]),
        presence_penalty=draw.choice([0.0, 0.7]),
        frequency_penalty=draw.choice([0.0, -0.4]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        logit_bias=draw.choice([{}, {64: 8.0, 70: 5.0, EOS_TOKEN_ID: 6.0}]),
        allowed_token_ids=draw.choice([None, ALLOWED_IDS]),
        bad_words=draw.choice([(), tuple(BadWord.of_tokens(*ids) for ids in BAD_WORDS)]),
        logprobs=draw.choice([None, 0, 3]),
        prompt_logprobs=draw.choice([None, None, 2]),
        repetition_detection=draw.choice([None, RepetitionDetection(3, 1, 2)]),
    )


def constrained_params(draw: random.Random) -> SamplingParams:
    """Parameters that ban nothing that a constraint may need."""
    return SamplingParams(
        temperature=draw.choice([0.0, 1.5]),
        seed=draw.randint(-9, 9),
        max_tokens=draw.choice([6, 60]),
        min_tokens=draw.choice([0, 6]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        logprobs=draw.choice([None, 2]),
    )


def a_job(draw: random.Random) -> Job:
    """One request."""
    own = [draw.randint(10, 310) for _ in range(draw.randint(0, 3))]
    constraint = draw.choice([None, None, *CONSTRAINTS])
    if constraint is not None:
        params = constrained_params(draw)
    else:
        params = CONTRADICTION if draw.random() < 0.1 else free_params(draw)
    return Job(
        prompt=[*STEM[: draw.randint(1, 40)], *own],
        params=params,
        n=draw.randint(1, 3),
        constraint=constraint,
        priority=draw.randint(-2, 2),
        cache_namespace=draw.choice(["", "other"]),
    )


def a_mix(draw: random.Random) -> Mix:
    """Several requests, some of which are ended from outside."""
    jobs = [a_job(draw) for _ in range(draw.randint(6, 10))]
    choices = [(i, choice) for i, job in enumerate(jobs) for choice in range(job.n)]
    return Mix(jobs, {key: draw.randint(1, 6) for key in draw.sample(choices, 3)})


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_request_of_a_mix_gets_what_it_gets_alone(
    model_dir: Path, alone: LLM, depth: int
) -> None:
    with LLM(str(model_dir), options=crowded(depth)) as llm:
        for seed in range(NUM_MIXES):
            mix = a_mix(random.Random(f"{seed} at depth {depth}"))
            together, solo = run_together(llm, mix), alone.run(mix.jobs)
            for index, (job, mine, theirs) in enumerate(zip(mix.jobs, together, solo, strict=True)):
                require_promises(job, mine)
                require_equal(mine, theirs, {c: k for (i, c), k in mix.ends.items() if i == index})
        # It was about something.
        assert llm.load.preemptions > 0
        assert llm.load.prefix_hits > 0
        assert llm.trace.most_in_flight == depth
        assert llm.trace.most_rows == 8
        assert alone.trace.most_rows == 1


def run_together(llm: LLM, mix: Mix) -> list[Output]:
    """Run a mix and look into the scheduler after every step."""
    scheduler, checked = llm.engine.scheduler, set[int]()

    def ends_here(job: int, choice: int, output: Sequence[int]) -> bool:
        if llm.trace.num_steps not in checked:
            check_scheduler(scheduler, scheduler._limits)
            checked.add(llm.trace.num_steps)
        return len(output) == mix.ends.get((job, choice))

    outputs = llm.run(mix.jobs, ends_here=ends_here)
    check_scheduler(scheduler, scheduler._limits)
    assert (llm.load.running, llm.load.waiting, llm.load.kv_blocks_used) == (0, 0, 0)
    assert llm.trace.times[-1].num_rows == 0, "the worker knows that all have ended"
    return outputs


def require_equal(output: Output, solo: Output, ends: Mapping[int, int]) -> None:
    """The tokens of a solo run; up to its end for a choice that was ended from outside."""
    for index, (mine, theirs) in enumerate(zip(output.choices, solo.choices, strict=True)):
        end = ends.get(index, len(theirs.token_ids))
        assert mine.token_ids == theirs.token_ids[:end]
        if len(theirs.token_ids) < end or index not in ends:
            assert mine.finished.reason is theirs.finished.reason
            assert mine.finished.stop_token_id == theirs.finished.stop_token_id
            assert mine.finished.stop_detail == theirs.finished.stop_detail
        if mine.logprobs is not None and theirs.logprobs is not None:
            expected = theirs.logprobs.first(end)
            assert mine.logprobs.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
    if output.prompt_logprobs is not None and solo.prompt_logprobs is not None:
        expected_of_prompt = solo.prompt_logprobs.logprobs
        assert output.prompt_logprobs.logprobs == pytest.approx(expected_of_prompt, abs=TOLERANCE)


def require_promises(job: Job, output: Output) -> None:
    """What the parameters say holds for every choice."""
    assert output.prompt_ids == job.prompt
    assert len(output.choices) == job.n
    for choice in output.choices:
        require_counts(choice, job)
        if job.params is CONTRADICTION:
            assert choice.finished.reason is FinishReason.ERROR
            assert "ban every one" in str(choice.finished.error)
            continue
        assert choice.finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if job.constraint is None:
            require_masks(choice.token_ids, job.params)
        elif choice.token_ids[-1] == EOS_TOKEN_ID:
            assert CONSTRAINTS[job.constraint](choice.text)
        require_logprobs(choice, job.params)
    require_prompt_logprobs(output, job)


def require_counts(choice: Choice, job: Job) -> None:
    usage, num_tokens = choice.finished.usage, len(choice.token_ids)
    assert job.params.max_tokens is not None
    assert num_tokens <= job.params.max_tokens
    if choice.finished.reason is FinishReason.LENGTH:
        assert num_tokens == job.params.max_tokens
    assert usage.prompt_tokens == len(job.prompt)
    assert usage.output_tokens == num_tokens
    assert 0 <= usage.cached_tokens < len(job.prompt)
    assert usage.wasted_tokens <= usage.computed_tokens
    if job.params.repetition_detection is None:
        assert choice.finished.stop_detail != REPETITION_DETECTED


def require_masks(token_ids: Sequence[int], params: SamplingParams) -> None:
    """Nothing that was banned came out."""
    if params.allowed_token_ids is not None:
        assert set(token_ids) <= set(params.allowed_token_ids)
    for word in BAD_WORDS if params.bad_words else ():
        starts = range(len(token_ids) - len(word) + 1)
        assert not any(tuple(token_ids[i : i + len(word)]) == word for i in starts)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS_TOKEN_ID,))}
    assert not ends & set(token_ids[:-1]), "nothing follows a stop"
    assert not ends & set(token_ids[: params.min_tokens])


def require_logprobs(choice: Choice, params: SamplingParams) -> None:
    """One row per token, finite, with as many alternatives as asked for, best first."""
    assert (choice.logprobs is None) == (params.logprobs is None)
    if choice.logprobs is None or params.logprobs is None:
        return
    num_tokens = len(choice.token_ids)
    assert choice.logprobs.positions == [*range(num_tokens)]
    assert all(math.isfinite(value) and value <= 0 for value in choice.logprobs.logprobs)
    assert all(math.isfinite(value) for value in choice.logprobs.top_logprobs)
    assert all(1 <= rank <= 320 for rank in choice.logprobs.ranks)
    fewest = min(1, params.logprobs)  # a grammar may leave fewer than were asked for
    assert all(fewest <= count <= params.logprobs for count in choice.logprobs.num_top)


def require_prompt_logprobs(output: Output, job: Job) -> None:
    """Once for all choices, of every token but the first, whatever the cache held."""
    wanted = job.params.prompt_logprobs is not None and len(output.prompt_ids) > 1
    if not wanted:
        assert output.prompt_logprobs is None
    elif output.prompt_logprobs is not None:
        assert output.prompt_logprobs.start == 1
        assert output.prompt_logprobs.token_ids == output.prompt_ids[1:]
        assert all(math.isfinite(value) for value in output.prompt_logprobs.logprobs)
    else:
        raise AssertionError("prompt logprobs were asked for and not given")
