"""A little scheduler for the runner's tests: gives out blocks, keeps what every request knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.kv_cache.allocation import allocate
from services.worker.kv_cache.spec import KvCacheSpec
from services.worker.loader.load_model import LoadedModel
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.step_input import NewRow, Step
from services.worker.runner.step_output import StepOutput

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, seed=0)
_NO_IDS = np.zeros(0, dtype=np.int64)


def make_runner(
    loaded: LoadedModel,
    *,
    max_num_seqs: int = 8,
    max_model_len: int = 256,
    block_size: int = 4,
    num_blocks: int = 512,
) -> ModelRunner:
    """A runner over a loaded model, with a cache of its own."""
    spec = KvCacheSpec.of(loaded.config, block_size=block_size, dtype=loaded.dtype)
    return ModelRunner(
        loaded,
        kv_caches=allocate(spec, num_blocks, device=CPU),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        device=CPU,
    )


@dataclass
class Tracked:
    """What the driver knows of a request."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    choice: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_in_row: bool = False
    prompt_logprobs_done: bool = False
    pools: bool = False

    @property
    def outputs(self) -> list[int]:
        """Sampled tokens so far."""
        return self.tokens[self.num_prompt :]


class Driver:
    """Makes steps for a runner and follows what they give. Blocks are never used twice."""

    def __init__(self, runner: ModelRunner, *, block_size: int = 4, first_block: int = 1) -> None:
        self.runner = runner
        self.requests: dict[int, Tracked] = {}
        self._block_size = block_size
        self._next_block = first_block
        self._step = 0

    def add(
        self,
        handle: int,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        choice: int = 0,
        pools: bool = False,
    ) -> Tracked:
        """Make a request known; it gets a row in the first step that names it."""
        request = Tracked(list(prompt), len(prompt), params, choice, pools=pools)
        self.requests[handle] = request
        return request

    def plan(
        self,
        num_tokens: Mapping[int, int],
        *,
        ended: Sequence[int] = (),
        copies: Sequence[tuple[int, int]] = (),
    ) -> Step:
        """A step; requests without a row come as new ones with all they know."""
        for handle in ended:
            request = self.requests[handle]
            request.is_in_row, request.num_computed, request.blocks = False, 0, []
        new_rows, counts, new_blocks = [], [], []
        for handle, count in num_tokens.items():
            request = self.requests[handle]
            gained = self._grow(request, request.num_computed + count)
            if request.is_in_row:
                counts.append(len(gained))
                new_blocks += gained
            else:
                new_rows.append(self._new_row(handle, request))
                counts.append(0)
                request.is_in_row = True
            request.num_computed += count
        self._step += 1
        return Step(
            step=self._step,
            ended=list(ended),
            copy_src_block_ids=np.array([s for s, _ in copies], dtype=np.int64),
            copy_dst_block_ids=np.array([d for _, d in copies], dtype=np.int64),
            new_rows=new_rows,
            handles=list(num_tokens),
            num_tokens=np.array(list(num_tokens.values()), dtype=np.int64),
            num_new_blocks=np.array(counts, dtype=np.int64),
            new_block_ids=np.array(new_blocks, dtype=np.int64),
        )

    def step(self, num_tokens: Mapping[int, int], *, ended: Sequence[int] = ()) -> StepOutput:
        """Plan, run, and take the tokens."""
        return self.take(self.runner.execute(self.plan(num_tokens, ended=ended)))

    def take(self, output: StepOutput) -> StepOutput:
        """Append what a step sampled."""
        at = 0
        for handle, count in zip(output.handles, output.num_sampled, strict=True):
            self.requests[handle].tokens += output.token_ids[at : at + count]
            at += count
        assert at == len(output.token_ids)
        return output

    def generate(self, handle: int, num_outputs: int, *, chunk: int = 10**6) -> list[int]:
        """Run one request alone until it has so many outputs."""
        request = self.requests[handle]
        while len(request.outputs) < num_outputs:
            rest = len(request.tokens) - request.num_computed
            self.step({handle: min(rest, chunk)})
        return request.outputs

    def _new_row(self, handle: int, request: Tracked) -> NewRow:
        return NewRow(
            handle=handle,
            choice=request.choice,
            token_ids=np.array(request.tokens, dtype=np.int64),
            num_prompt_tokens=request.num_prompt,
            num_computed_tokens=request.num_computed,
            sampling=request.params,
            grammar_ref=0,
            block_ids=np.array(request.blocks, dtype=np.int64),
            prompt_logprobs_done=request.prompt_logprobs_done,
            pools=request.pools,
        )

    def _grow(self, request: Tracked, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // self._block_size) - len(request.blocks)
        gained = list(range(self._next_block, self._next_block + max(missing, 0)))
        self._next_block += len(gained)
        request.blocks += gained
        return gained
