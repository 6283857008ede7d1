"""Steps and results keep every value on their way through bytes."""

from __future__ import annotations

import struct

import numpy as np

from services.common.convert import sampling_to_message
from services.common.errors import InvalidRequest
from services.common.pb import worker_pb2
from services.common.sampling import SamplingParams
from services.worker.convert import failure_to_bytes, result_to_bytes, step_from_bytes
from services.worker.runner.step_output import PromptLogprobChunk, StepOutput
from services.worker.sampling.logprobs import LogprobColumns

COLUMNS = LogprobColumns(
    logprob=np.array([-0.5, -1.5], dtype=np.float32),
    rank=np.array([1, 4]),
    num_top=np.array([2, 0]),
    top_ids=np.array([7, 8]),
    top_logprobs=np.array([-0.5, -0.75], dtype=np.float32),
)


def test_a_step_is_read_whole() -> None:
    params = SamplingParams(temperature=0.25, seed=-3, min_tokens=2, allowed_token_ids=(1, 2))
    message = worker_pb2.ScheduledStep(
        step=12,
        finished=[1, 2],
        preempted=[3],
        copy_src_block_ids=[4],
        copy_dst_block_ids=[5],
        new_requests=[
            worker_pb2.NewRequest(
                handle=9,
                choice=2,
                token_ids=[10, 11, 12],
                num_prompt_tokens=2,
                num_computed_tokens=1,
                sampling=sampling_to_message(params),
                grammar_ref=6,
                block_ids=[20, 21],
                prompt_logprobs_done=True,
            )
        ],
        handle=[9, 4_000_000_000],
        num_tokens=[2, 1],
        num_new_blocks=[0, 1],
        new_block_ids=[30],
    )
    step = step_from_bytes(message.SerializeToString())
    assert (step.step, step.ended, step.handles) == (12, [1, 2, 3], [9, 4_000_000_000])
    assert (step.copy_src_block_ids.tolist(), step.copy_dst_block_ids.tolist()) == ([4], [5])
    assert (step.num_tokens.tolist(), step.num_new_blocks.tolist()) == ([2, 1], [0, 1])
    assert step.new_block_ids.tolist() == [30]
    (new,) = step.new_rows
    assert (new.handle, new.choice, new.token_ids.tolist()) == (9, 2, [10, 11, 12])
    assert (new.num_prompt_tokens, new.num_computed_tokens, new.grammar_ref) == (2, 1, 6)
    assert (new.block_ids.tolist(), new.prompt_logprobs_done) == ([20, 21], True)
    assert new.sampling == params


def test_a_result_is_written_whole() -> None:
    output = StepOutput(
        step=5,
        handles=[3, 4],
        num_sampled=[1, 0],
        token_ids=[99],
        logprobs=COLUMNS,
        logprob_positions=[0, 1],
        prompt_logprobs=[PromptLogprobChunk(4, 1, np.array([50, 51]), COLUMNS)],
        row_errors={4: InvalidRequest("nan", param="constraint")},
        pooled={5: np.array([1.0, -0.5], dtype=np.float32)},
        device_s=0.25,
    )
    message = worker_pb2.StepResult.FromString(result_to_bytes(output, gap_s=0.001))
    assert (message.step, list(message.handle)) == (5, [3, 4])
    assert (list(message.num_sampled), list(message.token_ids)) == ([1, 0], [99])
    assert (message.device_us, message.gap_us) == (250_000, 1_000)
    (error,) = message.row_error
    assert list(message.row_error_handle) == [4]
    assert (error.error_class, error.message, error.param) == (
        "InvalidRequest",
        "nan",
        "constraint",
    )
    for columns in (message.logprobs, message.prompt_logprobs[0]):
        assert list(columns.logprob) == [-0.5, -1.5]
        assert (list(columns.rank), list(columns.num_top)) == ([1, 4], [2, 0])
        assert (list(columns.top_ids), list(columns.top_logprobs)) == ([7, 8], [-0.5, -0.75])
    assert list(message.logprobs.position) == [0, 1]
    (vector,) = message.pooled
    assert (vector.handle, vector.values) == (5, struct.pack("<2f", 1.0, -0.5))
    chunk = message.prompt_logprobs[0]
    assert (chunk.handle, chunk.start, list(chunk.token_ids)) == (4, 1, [50, 51])
    assert not message.HasField("failed")


def test_a_failure_names_the_step_and_the_exception() -> None:
    message = worker_pb2.StepResult.FromString(failure_to_bytes(8, KeyError("x")))
    assert (message.step, message.failed.error_class) == (8, "KeyError")
    assert message.failed.message
