"""The engine in one process, for scripts: the same scheduler core, runner and text path, no gRPC.

>>> from services.offline import LLM                                       # doctest: +SKIP
>>> with LLM("smollm2") as llm:                                            # doctest: +SKIP
...     print(llm.chat([[{"role": "user", "content": "Hi"}]])[0].choices[0].text)
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from services.common.block_hash import directory_revision, root_key
from services.common.errors import SluicewayError
from services.common.grammar import check as check_constraint
from services.common.sampling import Constraint, SamplingParams
from services.pull import ensure_model
from services.scheduler.convert import outcome_from_bytes, plan_to_bytes
from services.scheduler.core.output import (
    AbortReason,
    Finished,
    LoadSnapshot,
    StepPlan,
    StepUpdate,
)
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import EngineLimits, Scheduler
from services.tokenizer.chat_template import Chat, ChatTemplates
from services.tokenizer.encode import Encoder
from services.worker.executor import Executor, StepTimes
from services.worker.runner.build import RunnerFacts, RunnerOptions, build_runner, resolve_device
from services.worker.sampling.grammar_compiler import GrammarCompiler

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """One output.

    Attributes:
        text: Decoded, special tokens left out.
        token_ids: As sampled, the one that ended it included.
        finished: Reason, usage and times.
    """

    text: str
    token_ids: list[int]
    finished: Finished


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one prompt."""

    prompt_ids: list[int]
    choices: list[Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions:
    """Settings of ``LLM``; names and defaults as the worker's and the scheduler's flags."""

    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "torch_sdpa"
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    pipeline_depth: int = 2
    enable_prefix_caching: bool = True
    num_threads: int | None = None


@dataclass(slots=True)
class Trace:
    """What the steps of one run looked like; for tests and benchmarks."""

    num_steps: int = 0
    most_rows: int = 0
    most_tokens: int = 0
    most_in_flight: int = 0
    times: list[StepTimes] = field(default_factory=list)


class LLM:
    """A model that answers lists of prompts. Use it as a context manager, or ``close`` it."""

    def __init__(self, model: str = "smollm2", *, options: LLMOptions | None = None) -> None:
        """
        Args:
            model: "smollm2", a local Hugging Face directory, or a hub id.
            options: Settings.

        Raises:
            ConfigError: The model, the device or the memory is not what the settings need.
        """
        options = options or LLMOptions()
        model_dir = ensure_model(model)
        self.trace = Trace()
        self._root_key = root_key(directory_revision(model_dir))
        self._encoder = Encoder(model_dir, num_threads=1)
        self._templates = ChatTemplates.load(model_dir)
        self._executor = Executor(num_threads=options.num_threads, on_step=self.trace.times.append)
        runner_options = RunnerOptions(
            model_dir=model_dir,
            dtype=options.dtype,
            device=resolve_device(options.device),
            attention_backend=options.attention_backend,
            block_size=options.block_size,
            num_gpu_blocks_override=options.num_gpu_blocks_override,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            gpu_memory_utilization=options.gpu_memory_utilization,
            max_model_len=options.max_model_len,
            # Every running request needs at least one token of the budget.
            max_num_seqs=min(options.max_num_seqs, options.max_num_batched_tokens),
            max_num_batched_tokens=options.max_num_batched_tokens,
            pipeline_depth=options.pipeline_depth,
        )
        self.facts = self._executor.load(
            lambda: build_runner(runner_options, report=lambda _: None)
        ).result()
        self._scheduler = Scheduler(_limits(self.facts, options))
        self._executor.use_compiler(
            GrammarCompiler(
                model_dir / "tokenizer.json",
                vocab_size=self.facts.vocab_size,
                eos_token_ids=self.facts.eos_token_ids,
            )
        )
        self._handles = itertools.count(1)
        self._grammar_refs = itertools.count(1)
        self._in_flight: deque[Future[bytes]] = deque()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads."""
        self._executor.close()
        self._encoder.close()

    @property
    def load(self) -> LoadSnapshot:
        """Counters since the start: preemptions, prefix hits and so on."""
        return self._scheduler.load()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; false if some are in use."""
        return self._scheduler.reset_prefix_cache()

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        constraint: Constraint | None = None,
        show_progress: bool = False,
    ) -> list[Output]:
        """Answer conversations, each a list of ``{"role": ..., "content": ...}``.

        Args and errors as ``generate``.
        """
        template = self._templates.choose(with_tools=False)
        prompts = [
            self._encode(
                template.render(Chat([dict(message) for message in messages])),
                add_special_tokens=False,
            )
            for messages in conversations
        ]
        return self.generate(
            prompts, params, n=n, constraint=constraint, show_progress=show_progress
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        constraint: Constraint | None = None,
        show_progress: bool = False,
    ) -> list[Output]:
        """Continue prompts, all at once.

        Args:
            prompts: Texts or token ids.
            params: One for all, or one each; default ``SamplingParams()``.
            n: Choices of each prompt.
            constraint: What every output must satisfy.
            show_progress: Draw a bar on standard error.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequest: A prompt, a parameter or the constraint cannot be used; nothing has run
                then.
        """
        each = _one_each(params, len(prompts))
        for one in each:
            one.validate()
        ids = [
            self._encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts
        ]
        grammar_ref = self._prepare(constraint)
        groups = [
            self._requests(prompt_ids, one, n=n, grammar_ref=grammar_ref)
            for prompt_ids, one in zip(ids, each, strict=True)
        ]
        self._add(groups)
        ended = self._run(sum(map(len, groups)), show_progress)
        self._executor.release([grammar_ref])
        return [
            Output(prompt_ids, [self._choice(request, ended) for request in group])
            for prompt_ids, group in zip(ids, groups, strict=True)
        ]

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encoder.encode_now(text, add_special_tokens=add_special_tokens, param="prompt")

    def _prepare(self, constraint: Constraint | None) -> int:
        if constraint is None:
            return 0
        check_constraint(constraint)
        ref = next(self._grammar_refs)
        self._executor.prepare(ref, constraint).result()
        return ref

    def _requests(
        self, prompt_ids: list[int], params: SamplingParams, *, n: int, grammar_ref: int
    ) -> list[Request]:
        now = time.monotonic()
        return [
            Request(
                handle=next(self._handles),
                request_id=f"offline-{choice}",
                choice=choice,
                prompt_ids=prompt_ids,
                sampling=params,
                root_key=self._root_key,
                arrival_s=now,
                grammar_ref=grammar_ref,
            )
            for choice in range(n)
        ]

    def _add(self, groups: Sequence[list[Request]]) -> None:
        """Hand all requests to the scheduler, or none."""
        now = time.monotonic()
        added: list[Request] = []
        try:
            for group in groups:
                self._scheduler.add(group, now=now)
                added += group
        except SluicewayError:
            for request in added:
                self._scheduler.abort(
                    request.handle, reason=AbortReason.CLIENT_GONE, kept_tokens=None, now=now
                )
            self._scheduler.take_finished()
            raise

    def _run(self, num_requests: int, show_progress: bool) -> dict[int, Finished]:
        progress = _Progress(num_requests) if show_progress else None
        num_tokens_before = self.load.generated_tokens
        ended: dict[int, Finished] = {}
        while self._scheduler.has_work or self._in_flight:
            plan = self._scheduler.schedule(now=time.monotonic())
            if plan is not None:
                self._in_flight.append(self._executor.submit(plan_to_bytes(plan)))
                self._note(plan)
                continue
            update = self._apply_oldest()
            ended |= {finished.handle: finished for finished in update.finished}
            if progress:
                progress.show(len(ended), self.load.generated_tokens - num_tokens_before)
        self._scheduler.take_kv_events()  # nobody is told, and they must not pile up
        return ended

    def _note(self, plan: StepPlan) -> None:
        self.trace.num_steps += 1
        self.trace.most_rows = max(self.trace.most_rows, len(plan.handles))
        self.trace.most_tokens = max(self.trace.most_tokens, plan.total_num_tokens)
        self.trace.most_in_flight = max(self.trace.most_in_flight, len(self._in_flight))

    def _apply_oldest(self) -> StepUpdate:
        outcome, _ = outcome_from_bytes(self._in_flight.popleft().result())
        return self._scheduler.apply(outcome, now=time.monotonic())

    def _choice(self, request: Request, ended: Mapping[int, Finished]) -> Choice:
        token_ids = request.output_ids
        text = self._encoder.decode(token_ids, skip_special_tokens=True)
        return Choice(text, token_ids, ended[request.handle])


class _Progress:
    """A line that tells how far a run is."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._started = time.monotonic()

    def show(self, done: int, num_tokens: int) -> None:
        """Draw it again."""
        seconds = time.monotonic() - self._started
        rate = num_tokens / seconds if seconds else 0.0
        end = "\n" if done == self._total else ""
        sys.stderr.write(f"\r{done}/{self._total} prompts, {rate:.0f} tokens/s{end}")


def _limits(facts: RunnerFacts, options: LLMOptions) -> EngineLimits:
    return EngineLimits(
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        eos_token_ids=facts.eos_token_ids,
        vocab_size=facts.vocab_size,
        pipeline_depth=options.pipeline_depth,
        enable_prefix_caching=options.enable_prefix_caching,
        max_waiting=sys.maxsize,
    )


def _one_each(
    params: SamplingParams | Iterable[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    if len(each) != count:
        raise ValueError(f"{count} prompts, but {len(each)} sampling parameters")
    return each
