"""What a Session hands to the fleet: an Add without protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.sampling import Constraint, SamplingParams


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """One choice of a submission.

    Attributes:
        handle: The client's name for it.
        index: Its index in the request; never renumbered.
        resume_ids: Output tokens that an earlier attempt delivered.
    """

    handle: int
    index: int
    resume_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One attempt of a request.

    Attributes:
        text_fp: Fingerprint of the tokenizer that made the prompt; "" = any engine will do.
        deadline_s: Remaining seconds; ``None`` = no deadline.
        crashes: Engines that have died under this request.
        pools: Not tokens are wanted but one vector of the prompt.
    """

    request_id: str
    attempt: int
    model: str
    text_fp: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: tuple[ChoiceSpec, ...]
    prompt_logprobs_done: bool = False
    crashes: int = 0
    priority: int = 0
    cache_namespace: str = ""
    deadline_s: float | None = None
    constraint: Constraint | None = None
    pools: bool = False
