"""A scheduler core and a worker's executor, side by side: requests in, results out.

Steps go from one to the other past the wire. Knows token ids, no text.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from services.common.block_hash import directory_revision, root_key
from services.common.errors import SluicewayError
from services.common.grammar import check as check_constraint
from services.common.sampling import Constraint, draw_seed
from services.offline.convert import OUTCOMES, Outcome, step_of
from services.offline.jobs import EndsHere, Job
from services.offline.options import LLMOptions
from services.offline.progress import ProgressLine
from services.offline.results import Results
from services.offline.trace import Trace
from services.scheduler.core.output import AbortReason, StepUpdate
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.worker.executor import Executor
from services.worker.runner.build import build_runner


class LocalEngine:
    """Runs groups of requests, one call after another.

    Attributes:
        scheduler: The core.
        facts: What the runner discovered.
        trace: What its steps looked like.
    """

    def __init__(self, model_dir: Path, options: LLMOptions) -> None:
        """
        Args:
            model_dir: A Hugging Face directory.
            options: Settings.

        Raises:
            ConfigError: The model, the device or the memory is not what the settings need.
        """
        self.trace = Trace()
        self._executor = Executor(
            num_threads=options.num_threads, on_step=lambda times: self.trace.times.append(times)
        )
        runner_options = options.for_runner(model_dir)
        self.facts = self._executor.load(
            lambda: build_runner(runner_options, report=lambda _: None)
        ).result()
        self.scheduler = Scheduler(options.for_scheduler(self.facts))
        self._revision = directory_revision(model_dir)
        self._handles = itertools.count(1)
        self._grammar_refs = itertools.count(1)
        self._in_flight: deque[Future[Outcome]] = deque()

    def close(self) -> None:
        """Stop the threads."""
        self._executor.close()

    @contextmanager
    def prepared(
        self, constraints: Iterable[Constraint | None]
    ) -> Iterator[dict[Constraint | None, int]]:
        """Compile each constraint once, for as long as the context lasts; gives their numbers.

        Raises:
            InvalidRequest: One of them cannot be enforced.
        """
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

    def requests(self, prompt_ids: list[int], job: Job, *, grammar_ref: int) -> list[Request]:
        """The choices of a job; all have one seed, drawn if the job has none."""
        now = time.monotonic()
        sampling = job.params
        if sampling.seed is None:
            sampling = replace(sampling, seed=draw_seed())
        return [
            Request(
                handle=next(self._handles),
                request_id=f"offline-{choice}",
                choice=choice,
                prompt_ids=prompt_ids,
                sampling=sampling,
                root_key=root_key(self._revision, cache_namespace=job.cache_namespace),
                arrival_s=now,
                priority=job.priority,
                grammar_ref=grammar_ref,
                pools=job.pools,
            )
            for choice in range(job.n)
        ]

    def run(
        self,
        groups: Sequence[list[Request]],
        *,
        ends_here: EndsHere | None,
        show_progress: bool,
    ) -> Results:
        """Run all groups to their ends.

        Args:
            groups: The choices of each job.
            ends_here: Asked about every choice that has got tokens.
            show_progress: Draw a line on standard error.

        Raises:
            SluicewayError: One of the groups is refused; nothing has run then.
        """
        self._add(groups)
        progress = ProgressLine(sum(map(len, groups))) if show_progress else None
        num_tokens_before = self._num_tokens
        job_of = {request.handle: job for job, group in enumerate(groups) for request in group}
        results = Results()
        while self.scheduler.has_work or self._in_flight:
            if self._send_step():
                continue
            update = self._await_step(results)
            if ends_here is not None:
                self._end_where(ends_here, update, job_of)
                results.take_ends(self.scheduler.take_finished())
            if progress:
                progress.show(len(results.finished), self._num_tokens - num_tokens_before)
        self.scheduler.take_kv_events()  # nobody is told, and they must not pile up
        return results

    @property
    def _num_tokens(self) -> int:
        return self.scheduler.load().generated_tokens

    def _add(self, groups: Sequence[list[Request]]) -> None:
        """Hand all requests to the scheduler, or none."""
        now = time.monotonic()
        added: list[Request] = []
        try:
            for group in groups:
                self.scheduler.add(group, now=now)
                added += group
        except SluicewayError:
            for request in added:
                self.scheduler.abort(
                    request.handle, reason=AbortReason.CLIENT_GONE, kept_tokens=None, now=now
                )
            self.scheduler.take_finished()
            raise

    def _send_step(self) -> bool:
        """Plan and submit the next step; false if it cannot be planned yet."""
        plan = self.scheduler.schedule(now=time.monotonic())
        if plan is None:
            return False
        self._in_flight.append(self._executor.submit_step(step_of(plan), OUTCOMES))
        self.trace.note(plan, num_in_flight=len(self._in_flight))
        return True

    def _await_step(self, results: Results) -> StepUpdate:
        """Wait for the oldest step and apply it."""
        outcome, logprobs = self._in_flight.popleft().result()
        update = self.scheduler.apply(outcome, now=time.monotonic())
        results.take(update, logprobs)
        return update

    def _end_where(
        self, ends_here: EndsHere, update: StepUpdate, job_of: Mapping[int, int]
    ) -> None:
        for handle in update.handles:
            request = self.scheduler.get(handle)
            if request is not None and ends_here(
                job_of[handle], request.choice, request.output_ids
            ):
                self.scheduler.abort(
                    handle,
                    reason=AbortReason.STOP_STRING,
                    kept_tokens=None,
                    now=time.monotonic(),
                )
