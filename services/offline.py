"""The engine in one process, for scripts: the same scheduler core, runner and text path, no gRPC.

>>> from services.offline import LLM, Job                                  # doctest: +SKIP
>>> with LLM("smollm2") as llm:                                            # doctest: +SKIP
...     print(llm.chat([[{"role": "user", "content": "Hi"}]])[0].choices[0].text)
...     haiku, joke = llm.run([Job(prompt="A haiku:", n=3), Job(prompt="A joke:")])
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, cast

from services.common.block_hash import directory_revision, root_key
from services.common.errors import InvalidRequest, SluicewayError
from services.common.grammar import check as check_constraint
from services.common.sampling import Constraint, SamplingParams
from services.pull import ensure_model
from services.scheduler.convert import LogprobColumns, outcome_from_bytes, plan_to_bytes
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
from services.tokenizer.convert import LogprobReader, prompt_logprobs_from_message
from services.tokenizer.encode import Encoder
from services.tokenizer.tokens import Logprobs, PromptLogprobs
from services.worker.executor import Executor, StepTimes
from services.worker.native.isa import IsaSetting
from services.worker.runner.build import RunnerFacts, RunnerOptions, build_runner, resolve_device
from services.worker.sampling.grammar_compiler import GrammarCompiler

Prompt = str | Sequence[int]

EndsHere = Callable[[int, int, Sequence[int]], bool]
"""Given the index of a job, of a choice, and its output so far: whether that choice ends here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt and all that is asked of it.

    Attributes:
        prompt: Text or token ids.
        params: How tokens are drawn.
        n: Number of choices.
        constraint: What every choice must satisfy.
        priority: Lower runs first; refused if ``LLMOptions.scheduling_policy`` is "fcfs".
        cache_namespace: Jobs of different namespaces never share KV blocks.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    constraint: Constraint | None = None
    priority: int = 0
    cache_namespace: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One output.

    Attributes:
        text: Decoded, special tokens left out.
        token_ids: As sampled, the one that ended it included.
        finished: Reason, usage and times.
        logprobs: Of each token, if asked for.
    """

    text: str
    token_ids: list[int]
    finished: Finished
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one prompt.

    Attributes:
        prompt_ids: Its tokens.
        choices: In order.
        prompt_logprobs: Of each prompt token but the first, if asked for.
    """

    prompt_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: PromptLogprobs | None = None


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
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    num_threads: int | None = None
    cpu_isa: IsaSetting = "auto"


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
        self._revision = directory_revision(model_dir)
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
            cpu_isa=options.cpu_isa,
            num_threads=options.num_threads,
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
        jobs = [
            Job(prompt=prompt, params=one, n=n, constraint=constraint)
            for prompt, one in zip(prompts, each, strict=True)
        ]
        return self.run(jobs, show_progress=show_progress)

    def run(
        self,
        jobs: Sequence[Job],
        *,
        ends_here: EndsHere | None = None,
        show_progress: bool = False,
    ) -> list[Output]:
        """Continue prompts of which each may ask for something else, all at once.

        Args:
            jobs: The prompts and what is asked of them.
            ends_here: Asked about every choice that has got tokens; it then ends as ``stop``.
            show_progress: Draw a bar on standard error.

        Returns:
            One output per job, in order.

        Raises:
            InvalidRequest: One of the jobs cannot be done; nothing has run then.
        """
        for job in jobs:
            job.params.validate()
            if job.n < 1:
                raise InvalidRequest(f"n must be at least 1, got {job.n}", param="n")
        ids = [
            self._encode(job.prompt) if isinstance(job.prompt, str) else list(job.prompt)
            for job in jobs
        ]
        with self._prepared(job.constraint for job in jobs) as grammar_refs:
            groups = [
                self._requests(prompt_ids, job, grammar_ref=grammar_refs[job.constraint])
                for prompt_ids, job in zip(ids, jobs, strict=True)
            ]
            self._add(groups)
            results = self._run_all(groups, ends_here, show_progress=show_progress)
        return [
            self._output(prompt_ids, group, results)
            for prompt_ids, group in zip(ids, groups, strict=True)
        ]

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encoder.encode_now(text, add_special_tokens=add_special_tokens, param="prompt")

    @contextmanager
    def _prepared(
        self, constraints: Iterable[Constraint | None]
    ) -> Iterator[dict[Constraint | None, int]]:
        """Compile each constraint once, for as long as the context lasts; gives their numbers."""
        distinct = [constraint for constraint in dict.fromkeys(constraints) if constraint]
        for constraint in distinct:
            check_constraint(constraint)
        refs: dict[Constraint | None, int] = {None: 0}
        try:
            for constraint in distinct:
                refs[constraint] = next(self._grammar_refs)
                self._executor.prepare(refs[constraint], constraint).result()
            yield refs
        finally:
            self._executor.release([ref for ref in refs.values() if ref])

    def _requests(self, prompt_ids: list[int], job: Job, *, grammar_ref: int) -> list[Request]:
        now = time.monotonic()
        return [
            Request(
                handle=next(self._handles),
                request_id=f"offline-{choice}",
                choice=choice,
                prompt_ids=prompt_ids,
                sampling=job.params,
                root_key=root_key(self._revision, cache_namespace=job.cache_namespace),
                arrival_s=now,
                priority=job.priority,
                grammar_ref=grammar_ref,
            )
            for choice in range(job.n)
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

    def _run_all(
        self,
        groups: Sequence[list[Request]],
        ends_here: EndsHere | None,
        *,
        show_progress: bool,
    ) -> _Results:
        progress = _Progress(sum(map(len, groups))) if show_progress else None
        num_tokens_before = self.load.generated_tokens
        job_of = {request.handle: job for job, group in enumerate(groups) for request in group}
        results = _Results()
        while self._scheduler.has_work or self._in_flight:
            plan = self._scheduler.schedule(now=time.monotonic())
            if plan is not None:
                self._in_flight.append(self._executor.submit(plan_to_bytes(plan)))
                self._note(plan)
                continue
            outcome, logprobs = outcome_from_bytes(self._in_flight.popleft().result())
            update = self._scheduler.apply(outcome, now=time.monotonic())
            results.take(update, logprobs)
            if ends_here is not None:
                self._end_where(ends_here, update, job_of)
                results.take_ends(self._scheduler.take_finished())
            if progress:
                num_tokens = self.load.generated_tokens - num_tokens_before
                progress.show(len(results.finished), num_tokens)
        self._scheduler.take_kv_events()  # nobody is told, and they must not pile up
        return results

    def _end_where(
        self, ends_here: EndsHere, update: StepUpdate, job_of: Mapping[int, int]
    ) -> None:
        for handle in update.handles:
            request = self._scheduler.get(handle)
            if request is not None and ends_here(
                job_of[handle], request.choice, request.output_ids
            ):
                self._scheduler.abort(
                    handle,
                    reason=AbortReason.STOP_STRING,
                    kept_tokens=None,
                    now=time.monotonic(),
                )

    def _note(self, plan: StepPlan) -> None:
        self.trace.num_steps += 1
        self.trace.most_rows = max(self.trace.most_rows, len(plan.handles))
        self.trace.most_tokens = max(self.trace.most_tokens, plan.total_num_tokens)
        self.trace.most_in_flight = max(self.trace.most_in_flight, len(self._in_flight))

    def _output(self, prompt_ids: list[int], group: Sequence[Request], results: _Results) -> Output:
        found = [results.prompt_logprobs.get(request.handle) for request in group]
        return Output(
            prompt_ids,
            [self._choice(request, results) for request in group],
            next(filter(None, found), None),  # the choice that computed the prompt has them
        )

    def _choice(self, request: Request, results: _Results) -> Choice:
        return Choice(
            self._encoder.decode(request.output_ids, skip_special_tokens=True),
            request.output_ids,
            results.finished[request.handle],
            results.logprobs.get(request.handle),
        )


class _Results:
    """What the steps of one run said, by handle."""

    def __init__(self) -> None:
        self.finished: dict[int, Finished] = {}
        self.logprobs: dict[int, Logprobs] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}

    def take(self, update: StepUpdate, logprobs: LogprobColumns) -> None:
        """Take a step's."""
        for handle, offset, count, start in zip(
            update.handles, update.offsets, update.counts, update.source_starts, strict=True
        ):
            message = logprobs.of(start, count)
            if message is not None:
                found = LogprobReader(message).take(0, count) or Logprobs()
                self.logprobs.setdefault(handle, Logprobs()).extend(found, shift=offset)
        for handle, chunk in update.prompt_logprobs:
            part = prompt_logprobs_from_message(cast("Any", chunk))  # opaque to the core
            if handle in self.prompt_logprobs:
                self.prompt_logprobs[handle].extend(part)
            else:
                self.prompt_logprobs[handle] = part
        self.take_ends(update.finished)

    def take_ends(self, finished: Iterable[Finished]) -> None:
        """Take ends."""
        self.finished |= {end.handle: end for end in finished}


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
        policy=options.scheduling_policy,
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
