"""Steps and results from the scheduler's values to the worker's and back, past the wire."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.output import NewRow, StepOutcome, StepPlan
from services.tokenizer.tokens import Logprobs, PromptLogprobs
from services.worker.executor import ResultForm
from services.worker.runner import step_input
from services.worker.runner.step_output import PromptLogprobChunk, StepOutput

_NO_BLOCKS = np.zeros(0, dtype=np.int64)


class OutputLogprobs:
    """Log-probabilities of one step's output tokens, found by the index of the token."""

    def __init__(self, output: StepOutput) -> None:
        """
        Args:
            output: One that has some.
        """
        assert output.logprobs is not None
        self._columns = output.logprobs
        self._row_of = {index: row for row, index in enumerate(output.logprob_positions)}
        self._top_start = [0, *np.cumsum(output.logprobs.num_top).tolist()]

    def of(self, index: int) -> Logprobs | None:
        """Those of the token at an index of the step's ``token_ids``; ``None`` if it has none."""
        row = self._row_of.get(index)
        if row is None:
            return None
        columns, tops = self._columns, slice(self._top_start[row], self._top_start[row + 1])
        return Logprobs(
            [0],
            [columns.logprob[row].item()],
            [columns.rank[row].item()],
            [columns.num_top[row].item()],
            columns.top_ids[tops].tolist(),
            columns.top_logprobs[tops].tolist(),
        )


Outcome = tuple[StepOutcome, OutputLogprobs | None]


def step_of(plan: StepPlan) -> step_input.Step:
    """A plan as the runner takes it."""
    return step_input.Step(
        step=plan.step,
        ended=[*plan.finished, *plan.preempted],
        copy_src_block_ids=_NO_BLOCKS,
        copy_dst_block_ids=_NO_BLOCKS,
        new_rows=[_new_row(row) for row in plan.new_rows],
        handles=plan.handles,
        num_tokens=np.array(plan.num_tokens, dtype=np.int64),
        num_new_blocks=np.array(plan.num_new_blocks, dtype=np.int64),
        new_block_ids=np.array(plan.new_block_ids, dtype=np.int64),
    )


def prompt_logprobs_of(chunk: PromptLogprobChunk) -> PromptLogprobs:
    """Rows of a prompt's log-probabilities."""
    columns = chunk.columns
    return PromptLogprobs(
        chunk.start,
        chunk.token_ids.tolist(),
        columns.logprob.tolist(),
        columns.rank.tolist(),
        columns.num_top.tolist(),
        columns.top_ids.tolist(),
        columns.top_logprobs.tolist(),
    )


def _new_row(row: NewRow) -> step_input.NewRow:
    return step_input.NewRow(
        handle=row.handle,
        choice=row.choice,
        token_ids=np.array(row.token_ids, dtype=np.int64),
        num_prompt_tokens=row.num_prompt_tokens,
        num_computed_tokens=row.num_computed_tokens,
        sampling=row.sampling,
        grammar_ref=row.grammar_ref,
        block_ids=np.array(row.block_ids, dtype=np.int64),
        prompt_logprobs_done=row.prompt_logprobs_done,
        pools=row.pools,
    )


def _outcome_of(output: StepOutput, gap_s: float) -> Outcome:
    outcome = StepOutcome(
        step=output.step,
        handles=output.handles,
        num_sampled=output.num_sampled,
        token_ids=output.token_ids,
        prompt_logprobs={chunk.handle: chunk for chunk in output.prompt_logprobs},
        row_errors=output.row_errors,
        pooled={handle: vector.tobytes() for handle, vector in output.pooled.items()},
        device_s=output.device_s,
        gap_s=gap_s,
    )
    return outcome, None if output.logprobs is None else OutputLogprobs(output)


def _failed_outcome(step: int, error: Exception) -> Outcome:
    return StepOutcome(step=step, failed=f"{type(error).__name__}: {error}"), None


OUTCOMES = ResultForm(_outcome_of, _failed_outcome)
"""Results as the scheduler takes them, and the log-probabilities that came with them."""
