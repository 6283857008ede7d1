"""What the steps of one run said about its requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from services.offline.convert import OutputLogprobs, prompt_logprobs_of
from services.scheduler.core.output import Finished, StepUpdate
from services.tokenizer.tokens import Logprobs, PromptLogprobs
from services.worker.runner.step_output import PromptLogprobChunk


class Results:
    """Grows step by step.

    Attributes:
        finished: The end of each request that has one, by handle.
        logprobs: Of the requests that asked for them, by handle.
        prompt_logprobs: Likewise.
    """

    def __init__(self) -> None:
        self.finished: dict[int, Finished] = {}
        self.logprobs: dict[int, Logprobs] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}

    def take(self, update: StepUpdate, logprobs: OutputLogprobs | None) -> None:
        """Take a step's."""
        if logprobs is not None:
            for handle, offset, start in zip(
                update.handles, update.offsets, update.source_starts, strict=True
            ):
                found = logprobs.of(start)
                if found is not None:
                    self.logprobs.setdefault(handle, Logprobs()).extend(found, shift=offset)
        for handle, chunk in update.prompt_logprobs:
            part = prompt_logprobs_of(cast(PromptLogprobChunk, chunk))  # opaque to the core
            if handle in self.prompt_logprobs:
                self.prompt_logprobs[handle].extend(part)
            else:
                self.prompt_logprobs[handle] = part
        self.take_ends(update.finished)

    def take_ends(self, finished: Iterable[Finished]) -> None:
        """Take ends that came without a step."""
        self.finished |= {end.handle: end for end in finished}
