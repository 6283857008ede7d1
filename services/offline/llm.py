"""``LLM``: texts or token ids in, texts out, around an engine in this process."""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from services.common.errors import InvalidRequest, Unavailable
from services.common.sampling import Constraint, SamplingParams
from services.offline.engine import LocalEngine
from services.offline.jobs import Choice, EndsHere, Job, Output, Prompt
from services.offline.options import LLMOptions
from services.offline.results import Results
from services.offline.trace import Trace
from services.pull import ensure_model
from services.scheduler.core.output import Finished, LoadSnapshot
from services.scheduler.core.request import Request
from services.tokenizer.chat_template import Chat, ChatTemplates
from services.tokenizer.encode import Encoder
from services.worker.runner.build import RunnerFacts


class LLM:
    """A model that answers lists of prompts. Use it as a context manager, or ``close`` it.

    Attributes:
        engine: What runs them; for tests and benchmarks.
    """

    def __init__(self, model: str = "smollm2", *, options: LLMOptions | None = None) -> None:
        """
        Args:
            model: "smollm2", a local Hugging Face directory, or a hub id.
            options: Settings.

        Raises:
            ConfigError: The model, the device or the memory is not what the settings need.
        """
        model_dir = ensure_model(model)
        self._is_closed = False
        self._encoder = Encoder(model_dir, num_threads=1)
        self._templates = ChatTemplates.load(model_dir)
        self.engine = LocalEngine(model_dir, options or LLMOptions())

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
        """Stop the threads; nothing can be asked any more."""
        self._is_closed = True
        self.engine.close()
        self._encoder.close()

    @property
    def facts(self) -> RunnerFacts:
        """What was discovered about the model and the machine."""
        return self.engine.facts

    @property
    def trace(self) -> Trace:
        """What the steps so far looked like."""
        return self.engine.trace

    @property
    def load(self) -> LoadSnapshot:
        """Counters since the start: preemptions, prefix hits and so on."""
        return self.engine.scheduler.load()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; false if some are in use."""
        return self.engine.scheduler.reset_prefix_cache()

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
        _require_chats(conversations)
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
            Unavailable: The LLM is closed.
        """
        _require_prompts(prompts)
        each = _one_each(params, len(prompts))
        jobs = [
            Job(prompt=prompt, params=one, n=n, constraint=constraint)
            for prompt, one in zip(prompts, each, strict=True)
        ]
        return self.run(jobs, show_progress=show_progress)

    def embed(self, prompts: Sequence[Prompt], *, show_progress: bool = False) -> list[list[float]]:
        """Turn prompts into vectors, all at once.

        Args:
            prompts: Texts or token ids.
            show_progress: Draw a bar on standard error.

        Returns:
            One per prompt, in order: the mean over the prompt's tokens of the state after the final
            norm, scaled to length 1.

        Raises:
            InvalidRequest: A prompt cannot be used; nothing has run then.
            RequestFailed: The model's states are not numbers.
            Unavailable: The LLM is closed.
        """
        _require_prompts(prompts)
        jobs = [Job(prompt=prompt, pools=True) for prompt in prompts]
        return [
            _vector(output.choices[0].finished)
            for output in self.run(jobs, show_progress=show_progress)
        ]

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
            Unavailable: The LLM is closed.
        """
        if self._is_closed:
            raise Unavailable("this LLM is closed: use it in its with block, or before close()")
        _require_jobs(jobs)
        for job in jobs:
            job.params.validate()
            if job.n < 1:
                raise InvalidRequest(f"n must be at least 1, got {job.n}", param="n")
            if job.pools:
                _require_poolable(job)
        ids = [
            self._encode(job.prompt) if isinstance(job.prompt, str) else list(job.prompt)
            for job in jobs
        ]
        with self.engine.prepared(job.constraint for job in jobs) as grammar_refs:
            groups = [
                self.engine.requests(prompt_ids, job, grammar_ref=grammar_refs[job.constraint])
                for prompt_ids, job in zip(ids, jobs, strict=True)
            ]
            results = self.engine.run(groups, ends_here=ends_here, show_progress=show_progress)
        return [
            self._output(prompt_ids, group, results)
            for prompt_ids, group in zip(ids, groups, strict=True)
        ]

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encoder.encode_now(text, add_special_tokens=add_special_tokens, param="prompt")

    def _output(self, prompt_ids: list[int], group: Sequence[Request], results: Results) -> Output:
        found = [results.prompt_logprobs.get(request.handle) for request in group]
        return Output(
            prompt_ids,
            [self._choice(request, results) for request in group],
            next(filter(None, found), None),  # the choice that computed the prompt has them
        )

    def _choice(self, request: Request, results: Results) -> Choice:
        return Choice(
            self._encoder.decode(request.output_ids, skip_special_tokens=True),
            request.output_ids,
            results.finished[request.handle],
            results.logprobs.get(request.handle),
        )


def _require_chats(conversations: Iterable[object]) -> None:
    for index, chat in enumerate(conversations):
        messages = chat if isinstance(chat, Sequence) else ()
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest(
                f"conversations[{index}] must be a list of at least one message, "
                f"got {reprlib.repr(chat)}; a single chat is given as [chat]",
                param="conversations",
            )


def _require_prompts(prompts: object) -> None:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts must be a list of prompts, got {reprlib.repr(prompts)}; "
            "a single one is given as [prompt]",
            param="prompts",
        )


def _require_jobs(jobs: object) -> None:
    if not (isinstance(jobs, Sequence) and all(isinstance(job, Job) for job in jobs)):
        raise InvalidRequest(
            f"jobs must be a list of Job, as in run([Job(prompt=...)]), got {reprlib.repr(jobs)}",
            param="jobs",
        )


def _require_poolable(job: Job) -> None:
    if job.n > 1 or job.constraint is not None or job.params.prompt_logprobs is not None:
        raise InvalidRequest(
            "a job that pools has n 1, no constraint and no prompt_logprobs", param="pools"
        )


def _vector(finished: Finished) -> list[float]:
    if finished.error is not None:
        raise finished.error
    return list(struct.unpack(f"<{len(finished.pooled) // 4}f", finished.pooled))


def _one_each(
    params: SamplingParams | Iterable[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    if len(each) != count:
        raise ValueError(f"{count} prompts, but {len(each)} sampling parameters")
    return each
