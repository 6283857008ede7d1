"""What a client asks for, checked at the edge: after this nothing of a request can be malformed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.common.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from services.common.grammar import check as check_constraint
from services.common.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    Constraint,
    SamplingParams,
)
from services.tokenizer.prompt import Prompt
from services.tokenizer.tokens import Trace

MAX_STOPS = 128
MAX_STOP_CHARS = 4096


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """What the client has of a choice.

    Attributes:
        num_chars: Characters of text that it has received.
        is_finished: It has the choice's end too; nothing more is wanted.
    """

    index: int
    token_ids: Sequence[int]
    num_chars: int
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """Where an earlier attempt broke off. The prompt is not rendered again."""

    prompt_ids: Sequence[int]
    choices: Sequence[ResumedChoice]
    prompt_logprobs_done: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for text, with the wire's defaults filled in.

    Attributes:
        n: Number of choices.
        deadline_s: Seconds that are left; ``None`` = no deadline.
        bad_words: Words that must not come out.
        truncate_prompt_tokens: Keep so many last tokens of the prompt; -1 = what fits; ``None`` =
            all.
        pools: Not tokens are wanted but one vector of the prompt.
    """

    request_id: str
    attempt: int
    model: str
    prompt: Prompt
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    constraint: Constraint | None = None
    priority: int = 0
    tenant: str = ""
    cache_namespace: str = ""
    deadline_s: float | None = None
    trace: Trace | None = None
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    resume: Resume | None = None
    pools: bool = False


def require_valid(request: GenerateRequest, *, vocab_size: int, max_choices: int) -> None:
    """Refuse what can be refused without knowing the prompt's length.

    Raises:
        InvalidRequest: Names the field and its value.
        DeadlineExceeded: No time is left.
    """
    request.sampling.validate()
    request.sampling.validate_token_ids(vocab_size)
    if not 1 <= request.n <= max_choices:
        raise InvalidRequest(f"n must be in [1, {max_choices}], got {request.n}", param="n")
    _require_texts("stop", request.stop, max_items=MAX_STOPS, max_chars=MAX_STOP_CHARS)
    _require_texts(
        "bad_words", request.bad_words, max_items=MAX_BAD_WORDS, max_chars=MAX_BAD_WORD_CHARS
    )
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1 and keep < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1, got {keep}",
            param="truncate_prompt_tokens",
        )
    if request.constraint is not None:
        check_constraint(request.constraint)
    if request.deadline_s is not None and request.deadline_s <= 0:
        raise DeadlineExceeded("the request's deadline had passed when it arrived")
    if request.resume is not None:
        _require_resumable(request.resume, n=request.n)
    if request.pools:
        _require_poolable(request)


def _require_poolable(request: GenerateRequest) -> None:
    """A vector is made of a prompt alone; a lost one is made again, not resumed."""
    asked = {
        "n": request.n != 1,
        "stop": bool(request.stop),
        "constraint": request.constraint is not None,
        "prompt_logprobs": request.sampling.prompt_logprobs is not None,
        "resume": request.resume is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequest(f"{name} means nothing with pooling", param=name)


def _require_resumable(resume: Resume, *, n: int) -> None:
    indexes = [choice.index for choice in resume.choices]
    if len(set(indexes)) != len(indexes) or not all(0 <= index < n for index in indexes):
        raise InvalidRequest(
            f"resume: choices must be different ones of 0..{n - 1}, got {indexes}", param="resume"
        )


def _require_texts(param: str, texts: Sequence[str], *, max_items: int, max_chars: int) -> None:
    if len(texts) > max_items:
        raise InvalidRequest(
            f"{param} has {len(texts)} entries; at most {max_items} are allowed", param=param
        )
    for text in texts:
        if not 1 <= len(text) <= max_chars:
            raise InvalidRequest(
                f"{param}: each entry must have 1 to {max_chars} characters, one has {len(text)}",
                param=param,
            )


def truncate(
    prompt_ids: Sequence[int], *, keep: int | None, num_output_tokens: int, max_model_len: int
) -> Sequence[int]:
    """The last tokens of a prompt.

    Args:
        prompt_ids: All of it.
        keep: How many; -1 = as many as leave room for the output; ``None`` = all.
        num_output_tokens: How many shall fit behind it.
        max_model_len: The model's limit.
    """
    if keep is None:
        return prompt_ids
    room = max(max_model_len - num_output_tokens, 1)
    return prompt_ids[-(room if keep == -1 else keep) :]


def with_room(
    sampling: SamplingParams, *, num_prompt_tokens: int, max_model_len: int, param: str
) -> SamplingParams:
    """Sampling parameters whose ``max_tokens`` is set and fits behind the prompt.

    Args:
        sampling: As asked for; without ``max_tokens`` it gets the rest of the context.
        num_prompt_tokens: Length of the prompt.
        max_model_len: The model's limit.
        param: The field that the prompt came in.

    Raises:
        ContextLengthExceeded: It does not fit; the message has all the numbers.
    """
    limit = f"this model's maximum context length is {max_model_len} tokens"
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"{limit}, but the prompt has {num_prompt_tokens} tokens, which leaves no room for "
            "output; shorten it",
            param=param,
        )
    if sampling.max_tokens is None:
        if sampling.min_tokens > room:
            raise ContextLengthExceeded(
                f"{limit}: min_tokens ({sampling.min_tokens}) does not fit behind the prompt's "
                f"{num_prompt_tokens} tokens",
                param="min_tokens",
            )
        return replace(sampling, max_tokens=room)
    if sampling.max_tokens > room:
        raise ContextLengthExceeded(
            f"{limit}, but the prompt has {num_prompt_tokens} tokens and max_tokens asks for "
            f"{sampling.max_tokens} more, {num_prompt_tokens + sampling.max_tokens} in all; "
            "shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
    return sampling


def require_fit(*, num_prompt_tokens: int, max_model_len: int, param: str) -> None:
    """Refuse a prompt that is too long even with nothing behind it.

    Raises:
        ContextLengthExceeded: The message has all the numbers.
    """
    if num_prompt_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {max_model_len} tokens, but the input has "
            f"{num_prompt_tokens}; shorten it or set truncate_prompt_tokens",
            param=param,
        )
