"""The record of a request's end: what it cost and when it happened."""

from __future__ import annotations

from services.common.errors import SluicewayError
from services.scheduler.core.output import Finished, Life, Usage
from services.scheduler.core.request import Request
from services.scheduler.core.stop import Stop


def finished_record(
    request: Request,
    stop: Stop,
    *,
    error: SluicewayError | None,
    kept_tokens: int | None,
    now: float,
) -> Finished:
    """Describe how a request ended.

    Args:
        request: It ends now.
        stop: How.
        error: Why, if that is an error.
        kept_tokens: Output tokens that the client keeps (a stop string cuts the rest); None = all.
        now: The time.
    """
    return Finished(
        handle=request.handle,
        reason=stop.reason,
        usage=_usage(request, kept_tokens),
        life=_life(request, now),
        stop_token_id=stop.token_id,
        stop_detail=stop.detail,
        error=error,
        pooled=request.pooled,
    )


def _usage(request: Request, kept_tokens: int | None) -> Usage:
    """Count tokens; a token is needed once, whatever is computed beyond that is wasted.

    Every position but the last needs its KV once, from the cache or computed; a vector is made of
    the last one too.
    """
    output_tokens = request.num_output_tokens
    if kept_tokens is not None:
        output_tokens = min(output_tokens, kept_tokens)
    cached = request.num_cached_tokens or 0
    num_unneeded = 0 if request.pools else 1
    needed = request.num_prompt_tokens + output_tokens - num_unneeded - cached
    return Usage(
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=min(cached, request.num_prompt_tokens),
        computed_tokens=request.num_scheduled_tokens,
        output_tokens=output_tokens,
        wasted_tokens=max(0, request.num_scheduled_tokens - needed),
    )


def _life(request: Request, now: float) -> Life:
    return Life(
        arrival_s=request.arrival_s,
        first_scheduled_s=request.first_scheduled_s,
        first_token_s=request.first_token_s,
        last_token_s=request.last_token_s,
        finished_s=now,
        num_preemptions=request.num_preemptions,
        attempt=request.attempt,
    )
