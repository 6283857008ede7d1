"""Runs one step after another: applies what the step says to the rows, then forward, then sampling.

Order of application (wire.md, section 4): ended rows, block copies, new rows, diffs, run. Knows no
wire, no thread and no clock but the one that measures device time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.common.errors import InvariantError, SluicewayError
from services.worker.loader.load_model import LoadedModel
from services.worker.runner.input_batch import InputBatch, build_input_batch
from services.worker.runner.pooling import Pooler, read_vectors
from services.worker.runner.prompt_logprobs import PromptLogprobs
from services.worker.runner.request_state import UNKNOWN, RequestStates
from services.worker.runner.step_input import Ints, NewRow, Step, indices
from services.worker.runner.step_output import PromptLogprobChunk, StepOutput
from services.worker.sampling.base import LogitRows, to_device, to_host
from services.worker.sampling.logprobs import LogprobColumns, logprobs_of
from services.worker.sampling.row_grammars import RowGrammars
from services.worker.sampling.sampler import Sampled, Sampler, failure_of

_NO_LOGPROBS = -2


@dataclass(frozen=True, slots=True)
class _Samples:
    """What was sampled; line i belongs to the i-th sampling row of the batch.

    Attributes:
        logits: ``[n, vocab_size]``, before all transforms but the grammar's.
        sampled: The tokens.
        num_logprobs: ``[n]``: alternatives wanted; ``_NO_LOGPROBS`` = not even the token's own.
    """

    logits: torch.Tensor
    sampled: Sampled
    num_logprobs: Ints


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose device work has been given to the device; ``ModelRunner.read`` gets the result.

    Attributes:
        step: The step's number.
        batch: Its inputs; ``None`` if nothing ran.
        handles: ``[num_reqs]``: of the batch's rows.
        idle_handles: Named to run, but unknown or ended.
        samples: What was sampled; ``None`` if no row did.
        prompt_logprobs: Chunks of this step.
        pooled: ``[hidden_size]`` float32 by handle: of rows that pool and are complete.
        device_s: Time so far.
    """

    step: int
    batch: InputBatch | None
    handles: list[int]
    idle_handles: list[int]
    samples: _Samples | None
    prompt_logprobs: list[PromptLogprobChunk]
    pooled: dict[int, torch.Tensor]
    device_s: float


class ModelRunner:
    """A model, its KV cache and the rows of the running requests.

    Attributes:
        grammars: Those that rows follow; what a row shall follow is installed before its step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_caches: Sequence[torch.Tensor],
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            loaded: The model.
            kv_caches: One tensor per layer.
            max_num_seqs: Rows.
            max_model_len: Most tokens of one sequence.
            block_size: Tokens of one KV block.
            device: Where the model is.
        """
        self._model = loaded.model
        self._attention = loaded.attention
        self._kv_caches = kv_caches
        self._device = device
        self._states = RequestStates(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            device=device,
        )
        self._sampler = Sampler(
            max_num_seqs=max_num_seqs,
            vocab_size=loaded.config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            device=device,
            library=loaded.library,
        )
        self.grammars = RowGrammars(
            vocab_size=loaded.config.vocab_size, eos_token_ids=loaded.eos_token_ids, device=device
        )
        self._num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, dtype=np.int64)
        self._prompt_logprobs = PromptLogprobs(vocab_size=loaded.config.vocab_size)
        self._pooler = Pooler()

    @property
    def num_rows(self) -> int:
        """Requests that have a row."""
        return self._states.num_rows

    def reset(self) -> None:
        """Drop all rows and grammars. What the KV cache holds counts for nothing from here on."""
        self._end(self._states.handles)
        self.grammars.reset()

    def forget(self, step: Step) -> None:
        """Drop every row that a failed step named: nobody knows how far it got with them.

        The scheduler preempts them all; until it says so, steps that were in flight find no row and
        sample nothing.
        """
        self._end(step.ended)
        self._end(step.handles)
        self._end([new.handle for new in step.new_rows])

    def execute(self, step: Step) -> StepOutput:
        """Launch a step and read its result."""
        return self.read(self.launch(step))

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        """Apply a step to the rows and start its device work.

        Raises:
            InvariantError: The step contradicts the rows. Call ``forget`` then, and after any other
                exception.
        """
        self._end(step.ended)
        self._copy_blocks(step.copy_src_block_ids, step.copy_dst_block_ids)
        for new in step.new_rows:
            self._add(new)
        rows = self._apply_diffs(step)
        is_active = rows != UNKNOWN
        is_active &= ~self._states.has_ended[rows]
        active = np.flatnonzero(is_active)
        if not active.size:
            return LaunchedStep(step.step, None, [], step.handles, None, [], {}, 0.0)
        batch = build_input_batch(self._states, rows[active], step.num_tokens[active])
        started = time.perf_counter()
        samples, prompt_logprobs, pooled = self._run(batch)
        self._advance(batch, samples)
        handles = np.array(step.handles, dtype=np.int64)
        return LaunchedStep(
            step=step.step,
            batch=batch,
            handles=handles[active][batch.order].tolist(),
            idle_handles=handles[~is_active].tolist(),
            samples=samples,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            device_s=time.perf_counter() - started,
        )

    @torch.inference_mode()
    def read(self, launched: LaunchedStep) -> StepOutput:
        """Wait for a step's results; the next step may have been launched meanwhile."""
        batch, samples = launched.batch, launched.samples
        handles = [*launched.handles, *launched.idle_handles]
        pooled, pool_errors = read_vectors(launched.pooled)
        if batch is None or samples is None:
            return StepOutput(
                step=launched.step,
                handles=handles,
                num_sampled=[0] * len(handles),
                token_ids=[],
                prompt_logprobs=launched.prompt_logprobs,
                row_errors=pool_errors,
                pooled=pooled,
                device_s=launched.device_s,
                num_tokens=0 if batch is None else int(batch.num_tokens.sum()),
            )
        started = time.perf_counter()
        scores = to_host(samples.sampled.scores)
        token_ids = to_host(samples.sampled.token_ids)
        # The batch's rows come first in ``handles``, in its order.
        row_errors = self._follow(handles, batch, token_ids, scores)
        good = indices(batch.sampling_index.size)
        if row_errors:
            sampled_handles = np.array(handles)[batch.sampling_index]
            good = good[~np.isin(sampled_handles, list(row_errors))]
        num_sampled = np.zeros(len(handles), dtype=np.int64)
        num_sampled[batch.sampling_index[good]] = 1
        described, logprobs = self._logprobs(samples, good)
        return StepOutput(
            step=launched.step,
            handles=handles,
            num_sampled=num_sampled.tolist(),
            token_ids=token_ids[good].tolist(),
            logprobs=logprobs,
            logprob_positions=described.tolist(),
            prompt_logprobs=launched.prompt_logprobs,
            row_errors=row_errors | pool_errors,
            pooled=pooled,
            device_s=launched.device_s + time.perf_counter() - started,
            num_tokens=int(batch.num_tokens.sum()),
        )

    def _end(self, handles: Sequence[int]) -> None:
        for handle in handles:
            row = self._states.remove(handle)
            if row != UNKNOWN:
                self._sampler.remove(row)
                self._prompt_logprobs.remove(row)
                self._pooler.remove(row)
                self.grammars.remove(row)

    def _copy_blocks(self, src: Ints, dst: Ints) -> None:
        if not src.size:
            return
        source, target = to_device(src, self._device), to_device(dst, self._device)
        for cache in self._kv_caches:
            cache[:, target] = cache[:, source]

    def _add(self, new: NewRow) -> None:
        row = self._states.add(new)
        if new.grammar_ref:
            self.grammars.add(row, new.grammar_ref, new.token_ids[new.num_prompt_tokens :].tolist())
        params = new.sampling
        self._sampler.add(row, params, choice=new.choice)
        self._num_logprobs[row] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._prompt_logprobs.add(row, params, handle=new.handle, is_done=new.prompt_logprobs_done)
        if new.pools:
            self._pooler.add(row, new.handle)

    def _apply_diffs(self, step: Step) -> Ints:
        """Append new blocks; returns the row of each handle that shall run."""
        if len(set(step.handles)) < len(step.handles):
            raise InvariantError(f"step {step.step} names a request twice")
        rows = self._states.rows_of(step.handles)
        known, counts, block_ids = rows, step.num_new_blocks, step.new_block_ids
        is_known = rows != UNKNOWN
        if not is_known.all():
            block_ids = block_ids[np.repeat(is_known, counts)]
            known, counts = rows[is_known], counts[is_known]
        self._states.block_table.append(known, counts=counts, block_ids=block_ids)
        return rows

    def _run(
        self, batch: InputBatch
    ) -> tuple[_Samples | None, list[PromptLogprobChunk], dict[int, torch.Tensor]]:
        hidden = self._model.forward(
            batch.input_ids,
            batch.positions,
            kv_caches=self._kv_caches,
            attention=self._attention.begin_step(batch.attention),
        )
        prompt_logprobs = self._prompt_logprobs.chunks(
            self._states, batch, hidden, self._model.compute_logits
        )
        pooled = self._pooler.take(self._states, batch, hidden)
        if not batch.sampling_index.size:
            return None, prompt_logprobs, pooled
        if batch.sampling_index.size < hidden.shape[0]:
            hidden = hidden[to_device(batch.sampling_tokens, self._device)]
        logits = self._model.compute_logits(hidden)
        states, rows = self._states, batch.sampling_rows
        sampled = self._sampler.sample(
            logits,
            LogitRows(rows, states.num_prompt[rows], states.num_known[rows], states.token_ids),
            grammar=self.grammars.mask(rows),
        )
        return _Samples(logits, sampled, self._num_logprobs[rows]), prompt_logprobs, pooled

    def _advance(self, batch: InputBatch, samples: _Samples | None) -> None:
        """Count what the launched work computes; sampled tokens go to their rows on the device."""
        self._states.num_computed[batch.rows] += batch.num_tokens
        if samples is not None:
            self._states.append_sampled(batch.sampling_rows, samples.sampled.token_ids)

    def _logprobs(self, samples: _Samples, good: Ints) -> tuple[Ints, LogprobColumns | None]:
        """Log-probabilities that rows asked for, and which of the ``good`` lines they describe."""
        wanted = samples.num_logprobs[good]
        described = np.flatnonzero(wanted != _NO_LOGPROBS)
        if not described.size:
            return described, None
        lines = to_device(good[described], self._device)
        return described, logprobs_of(
            samples.logits[lines],
            samples.sampled.token_ids[lines],
            num_top=wanted[described].tolist(),
        )

    def _follow(
        self,
        handles: list[int],
        batch: InputBatch,
        token_ids: Ints,
        scores: npt.NDArray[np.float32],
    ) -> dict[int, SluicewayError]:
        """Tell the grammars what was sampled.

        Rows that failed or whose text has ended sample no more; they stay until the scheduler says
        that they finished.

        Returns:
            Why rows failed, by handle.
        """
        errors: dict[int, SluicewayError] = {}
        for line in np.flatnonzero(~np.isfinite(scores)).tolist():
            row = int(batch.sampling_rows[line])
            why = self.grammars.failure_of(row) or failure_of(float(scores[line]))
            errors[handles[batch.sampling_index[line]]] = why
        ended = set(errors)
        for line in self.grammars.lines_of(batch.sampling_rows):
            handle, row = handles[batch.sampling_index[line]], int(batch.sampling_rows[line])
            if handle in errors:
                continue
            if self.grammars.advance(row, int(token_ids[line])):
                ended.add(handle)
            elif failure := self.grammars.failure_of(row):
                errors[handle] = failure
                ended.add(handle)
        for handle in ended:
            self._states.mark_ended(handle)
        return errors
