"""Steps and results as bytes: the executor's thread parses and builds them, not the I/O loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.common.convert import (
    error_to_message,
    pools_from_message,
    sampling_from_message,
)
from services.common.pb import common_pb2, worker_pb2
from services.worker.runner.build import Progress, RunnerFacts
from services.worker.runner.step_input import Ints, NewRow, Step
from services.worker.runner.step_output import PromptLogprobChunk, StepOutput
from services.worker.sampling.logprobs import LogprobColumns


def step_from_bytes(data: bytes) -> Step:
    """Parse a serialised ``ScheduledStep``.

    Raises:
        google.protobuf.message.DecodeError: Not one.
    """
    message = worker_pb2.ScheduledStep.FromString(data)
    return Step(
        step=message.step,
        ended=[*message.finished, *message.preempted],
        copy_src_block_ids=_ints(message.copy_src_block_ids),
        copy_dst_block_ids=_ints(message.copy_dst_block_ids),
        new_rows=[_new_row(new) for new in message.new_requests],
        handles=list(message.handle),
        num_tokens=_ints(message.num_tokens),
        num_new_blocks=_ints(message.num_new_blocks),
        new_block_ids=_ints(message.new_block_ids),
    )


def result_to_bytes(output: StepOutput, gap_s: float) -> bytes:
    """Serialise a ``StepResult``.

    Args:
        output: What the runner gave.
        gap_s: From the end of the step before to the start of this one.
    """
    message = worker_pb2.StepResult(
        step=output.step,
        handle=output.handles,
        num_sampled=output.num_sampled,
        token_ids=output.token_ids,
        row_error_handle=list(output.row_errors),
        row_error=[error_to_message(error) for error in output.row_errors.values()],
        device_us=_microseconds(output.device_s),
        gap_us=_microseconds(gap_s),
    )
    if output.logprobs is not None:
        message.logprobs.CopyFrom(_logprobs(output.logprobs, output.logprob_positions))
    message.prompt_logprobs.extend(_prompt_logprobs(chunk) for chunk in output.prompt_logprobs)
    for handle, vector in output.pooled.items():
        message.pooled.add(handle=handle, values=vector.astype("<f4").tobytes())
    return message.SerializeToString()


def failure_to_bytes(step: int, error: Exception) -> bytes:
    """Serialise the ``StepResult`` of a step that an exception ended."""
    failed = worker_pb2.StepFailure(error_class=type(error).__name__, message=str(error))
    return worker_pb2.StepResult(step=step, failed=failed).SerializeToString()


def loading_to_message(progress: Progress) -> common_pb2.Loading:
    """How far loading is."""
    return common_pb2.Loading(
        phase=progress.phase,
        fraction=progress.fraction,
        done_bytes=progress.done_bytes,
        total_bytes=progress.total_bytes,
    )


def facts_to_message(facts: RunnerFacts, *, revision: str) -> common_pb2.WorkerInfo:
    """What the worker discovered about itself.

    Args:
        facts: Of the runner.
        revision: Of the weights.
    """
    return common_pb2.WorkerInfo(
        num_blocks=facts.num_blocks,
        kv_groups=[common_pb2.KvGroup(block_size=facts.block_size, kind="full")],
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        pipeline_depth=facts.pipeline_depth,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        revision=revision,
        device=facts.device,
        dtype=facts.dtype,
    )


def _new_row(message: worker_pb2.NewRequest) -> NewRow:
    return NewRow(
        handle=message.handle,
        choice=message.choice,
        token_ids=_ints(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        sampling=sampling_from_message(message.sampling),
        grammar_ref=message.grammar_ref,
        block_ids=_ints(message.block_ids),
        prompt_logprobs_done=message.prompt_logprobs_done,
        pools=pools_from_message(message.pooling),
    )


def _logprobs(columns: LogprobColumns, positions: list[int]) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(
        position=positions,
        logprob=columns.logprob.tolist(),
        rank=columns.rank.tolist(),
        num_top=columns.num_top.tolist(),
        top_ids=columns.top_ids.tolist(),
        top_logprobs=columns.top_logprobs.tolist(),
    )


def _prompt_logprobs(chunk: PromptLogprobChunk) -> common_pb2.PromptLogprobs:
    columns = chunk.columns
    return common_pb2.PromptLogprobs(
        handle=chunk.handle,
        start=chunk.start,
        token_ids=chunk.token_ids.tolist(),
        logprob=columns.logprob.tolist(),
        rank=columns.rank.tolist(),
        num_top=columns.num_top.tolist(),
        top_ids=columns.top_ids.tolist(),
        top_logprobs=columns.top_logprobs.tolist(),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64, count=len(values))


def _microseconds(seconds: float) -> int:
    return min(max(round(seconds * 1e6), 0), 2**32 - 1)
