"""Whether a request has ended with its last token. (Stop strings are the tokenizer's business.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.sampling import RepetitionDetection
from services.scheduler.core.output import FinishReason
from services.scheduler.core.request import Request

REPETITION_DETECTED = "repetition_detected"


@dataclass(frozen=True, slots=True)
class Stop:
    """How a request ended; fields as in ``Finished``."""

    reason: FinishReason
    token_id: int | None = None
    detail: str = ""


def set_stop_rules(
    request: Request, *, eos_token_ids: Sequence[int], max_total_tokens: int
) -> None:
    """Precompute what ``find_stop`` and the quick test before it need.

    Args:
        request: About to be added.
        eos_token_ids: The model's; empty for the request if it ignores them.
        max_total_tokens: Prompt and output together; the request ends when it has so many.
    """
    sampling = request.sampling
    ignores_eos = sampling.ignore_eos and not request.grammar_ref
    request.eos_ids = frozenset() if ignores_eos else frozenset(eos_token_ids)
    request.end_ids = request.eos_ids | frozenset(sampling.stop_token_ids)
    request.max_total_tokens = max_total_tokens


def find_stop(request: Request) -> Stop | None:
    """Whether the last output token ends the request.

    Order as in vLLM: nothing stops it before ``min_tokens`` (but a full context, which no setting
    can lengthen); then end of sequence, stop ids, length, repetition. The end of a grammar's text
    stops always: there is nothing that could follow.

    Args:
        request: Has at least one output token and has passed ``set_stop_rules``.
    """
    is_full = request.num_tokens >= request.max_total_tokens
    token_id = request.token_ids[-1]
    is_end = token_id in request.eos_ids
    if is_end and request.grammar_ref:
        return Stop(FinishReason.STOP)
    if request.num_output_tokens < request.sampling.min_tokens:
        return Stop(FinishReason.LENGTH) if is_full else None
    if is_end:
        return Stop(FinishReason.STOP)
    if token_id in request.end_ids:
        return Stop(FinishReason.STOP, token_id=token_id)
    if is_full:
        return Stop(FinishReason.LENGTH)
    rule = request.sampling.repetition_detection
    if rule is not None and _is_repeating(
        request.token_ids, num_prompt_tokens=request.num_prompt_tokens, rule=rule
    ):
        return Stop(FinishReason.STOP, detail=REPETITION_DETECTED)
    return None


def replay_stops(request: Request) -> Stop | None:
    """Check resumed output as if it came one token at a time; what follows a stop is cut off."""
    resumed = request.output_ids
    del request.token_ids[request.num_prompt_tokens :]
    request.num_tokens = request.num_prompt_tokens
    stop = None
    for token_id in resumed:
        request.token_ids.append(token_id)
        request.num_tokens += 1
        stop = find_stop(request)
        if stop is not None:
            break
    request.num_planned_tokens = request.num_tokens
    return stop


def _is_repeating(
    token_ids: Sequence[int], *, num_prompt_tokens: int, rule: RepetitionDetection
) -> bool:
    """Whether the output's tail is ``min_count`` copies of one pattern.

    Equal to: the last ``size * (min_count - 1)`` tokens each equal the token ``size`` before.
    """
    num_output_tokens = len(token_ids) - num_prompt_tokens
    longest = min(rule.max_pattern_size, num_output_tokens // rule.min_count)
    for size in range(rule.min_pattern_size, longest + 1):
        if token_ids[-1] != token_ids[-1 - size]:
            continue
        span = size * (rule.min_count - 1)
        if token_ids[-span:] == token_ids[-span - size : -size]:
            return True
    return False
