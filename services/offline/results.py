"""What the steps of one run said about its requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from services.scheduler.convert import LogprobColumns
from services.scheduler.core.output import Finished, StepUpdate
from services.tokenizer.convert import LogprobReader, prompt_logprobs_from_message
from services.tokenizer.tokens import Logprobs, PromptLogprobs


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
        """Take ends that came without a step."""
        self.finished |= {end.handle: end for end in finished}
