"""What is asked of the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.sampling import Constraint, SamplingParams
from services.scheduler.core.output import Finished
from services.tokenizer.tokens import Logprobs, PromptLogprobs

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
        pools: Not tokens are wanted but one vector of the prompt (see ``LLM.embed``); it comes as
            ``finished.pooled`` of the one choice: float32, little-endian.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    constraint: Constraint | None = None
    priority: int = 0
    cache_namespace: str = ""
    pools: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One output.

    Attributes:
        text: Decoded, special tokens left out.
        token_ids: As sampled, the one that ended it included.
        finished: Reason, usage and times; ``finished.error`` if the reason is ERROR.
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
