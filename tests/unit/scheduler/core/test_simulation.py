"""Ten thousand steps of mixed traffic against a device that checks every read, in seconds."""

from __future__ import annotations

import random

import pytest

from services.common.errors import Overloaded
from services.common.sampling import SamplingParams
from services.scheduler.core.output import AbortReason
from tests.unit.scheduler.core.harness import Harness, limits

NUM_STEPS = 10_000


def _prompt(rng: random.Random) -> list[int]:
    """Often a prefix that others have too."""
    shared = [7] * rng.choice([0, 0, 8, 17])
    return shared + [rng.randrange(2, 100) for _ in range(rng.choice([1, 3, 8, 30]))]


def _arrive(harness: Harness, rng: random.Random) -> None:
    prompt_ids = _prompt(rng)
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 12), seed=rng.randrange(1000), ignore_eos=rng.random() < 0.5
    )
    choices = [
        harness.request(prompt_ids, sampling=sampling, choice=i, priority=rng.choice([0, 0, -1, 2]))
        for i in range(rng.choice([1, 1, 1, 3]))
    ]
    for choice in choices[1:]:
        choice.priority = choices[0].priority
    try:
        harness.add(*choices)
    except Overloaded as error:
        assert error.retry_after_s is not None and error.retry_after_s >= 1.0


def _abort_someone(harness: Harness, rng: random.Random) -> None:
    alive = [handle for handle, seen in harness.seen.items() if seen.finished is None]
    if alive:
        reason = rng.choice([AbortReason.CLIENT_GONE, AbortReason.DEADLINE])
        harness.scheduler.abort(rng.choice(alive), reason=reason, kept_tokens=None, now=harness.now)
        harness.take_finished()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ten_thousand_steps_of_mixed_traffic_serve_every_request_as_if_it_were_alone(
    depth: int,
) -> None:
    rng = random.Random(depth)
    harness = Harness(
        limits(num_blocks=25, pipeline_depth=depth, max_num_batched_tokens=24, max_waiting=16),
        checks=False,
    )
    harness.step_s = 0.01
    while len(harness.plans) < NUM_STEPS:
        if rng.random() < 0.4:
            _arrive(harness, rng)
        if rng.random() < 0.02:
            _abort_someone(harness, rng)
        if len(harness.plans) % 500 == 0:
            harness.check()
        harness.step()
    harness.run()
    harness.check()
    harness.assert_all_served()
    load = harness.scheduler.load()
    assert load.preemptions > 50
    assert load.prefix_hits > 1000
    assert len(harness.seen) > 1000
