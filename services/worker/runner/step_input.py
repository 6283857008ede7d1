"""One step as the runner is told it: columns in numpy, one object only for what is new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.common.sampling import SamplingParams

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]

_INDICES = np.arange(4096)
_INDICES.setflags(write=False)


def indices(count: int) -> Ints:
    """0 to ``count`` - 1, read-only. Not made anew: ``arange`` gives the interpreter away."""
    return _INDICES[:count] if count <= _INDICES.size else np.arange(count)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request as it comes to a row, whole.

    Attributes:
        handle: The scheduler's number for it; what later steps call it.
        choice: Index of the choice in its request, part of the key of its draws.
        token_ids: Prompt, then the outputs known so far (a resumed request has some).
        num_prompt_tokens: How many of ``token_ids`` are prompt.
        num_computed_tokens: How many already have KV in ``block_ids``.
        sampling: How its tokens are drawn.
        grammar_ref: What Prepare made for it; 0 = nothing.
        block_ids: Its block table so far.
        prompt_logprobs_done: An earlier life has already delivered all prompt log-probabilities.
        pools: It samples nothing; a vector of its prompt is wanted.
    """

    handle: int
    choice: int
    token_ids: Ints
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    grammar_ref: int
    block_ids: Ints
    prompt_logprobs_done: bool
    pools: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What to run. Applied in the order of the fields: ended, copies, new rows, diffs, run.

    Attributes:
        step: Its number.
        ended: Handles that finished or were preempted; unknown ones are ignored.
        copy_src_block_ids: Blocks to copy, parallel to ``copy_dst_block_ids``.
        copy_dst_block_ids: Where to.
        new_rows: Requests that get a row.
        handles: ``[num_rows]``: which rows run, new ones included.
        num_tokens: ``[num_rows]``: how many tokens each computes.
        num_new_blocks: ``[num_rows]``: how many of ``new_block_ids`` its block table gains.
        new_block_ids: Flat.
    """

    step: int
    ended: list[int]
    copy_src_block_ids: Ints
    copy_dst_block_ids: Ints
    new_rows: list[NewRow]
    handles: list[int]
    num_tokens: Ints
    num_new_blocks: Ints
    new_block_ids: Ints
