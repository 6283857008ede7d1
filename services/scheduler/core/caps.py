"""The first door of the scheduler: what limits the tokens of a step, and of one request in it."""

from __future__ import annotations

from typing import Protocol

from services.scheduler.core.cost_model import StepCostModel
from services.scheduler.core.request import Request

_MOST_DECODES = 3.0
"""Steps of decoding alone that one with prompts beside may last: a stream that has been fast goes
on at a part of its speed and does not halt. Where more wait for their first token than decode
(the crowd), it is more by as much: a burst must not be held up by the first of it that decode."""

_MOST_TARGETS = 2.5
"""Times the target that a crowd may stretch a step to."""


class Cap(Protocol):
    """Limits what one request that computes several tokens may compute in this step."""

    def __call__(self, request: Request, num_tokens: int) -> int:
        """At most ``num_tokens``; 0 leaves the request out of this step."""


class LongPrefillCap:
    """At most ``max_tokens`` of one prompt in a step."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def __call__(self, request: Request, num_tokens: int) -> int:
        """See ``Cap``."""
        return min(num_tokens, self._max_tokens)


class TokenBudget:
    """How many tokens a step may hold.

    Without a target: ``max_tokens``. With one: as many as keep the step near the target and within
    some times what decoding alone takes, so that a long prompt does not make the others stutter; a
    step in which nobody decodes has nobody to disturb. Prompts always get as long as decoding takes
    beside them, or they would starve where decoding alone comes near the target.

    Args:
        max_tokens: Never more.
        target_s: Wanted duration of a step in seconds; 0 = no target.
        min_prefill_tokens: Prompts always get this much beside the decoding rows.
        cost_model: Knows how long steps take.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        target_s: float,
        min_prefill_tokens: int,
        cost_model: StepCostModel,
    ) -> None:
        self._max_tokens = max_tokens
        self._target_s = target_s
        self._min_prefill_tokens = min_prefill_tokens
        self._cost_model = cost_model

    @property
    def has_target(self) -> bool:
        """Whether ``for_step`` depends on its argument."""
        return self._target_s > 0.0

    def for_step(self, num_decode_rows: int, *, num_waiting: int) -> int:
        """Token budget of a step.

        Args:
            num_decode_rows: Running requests that compute one token.
            num_waiting: Requests whose prompt is not computed yet, running or about to.
        """
        if not self.has_target or num_decode_rows == 0:
            return self._max_tokens
        decode_s = self._cost_model.decode_s
        crowd = max(1.0, num_waiting / num_decode_rows)
        step_s = self._target_s * min(crowd, _MOST_TARGETS)
        if decode_s:
            step_s = min(step_s, _MOST_DECODES * crowd * decode_s)
        affordable = self._cost_model.prefill_tokens_in(
            max(step_s - decode_s, decode_s), boldness=crowd
        )
        if affordable is None:
            return self._max_tokens
        prefill_tokens = max(self._min_prefill_tokens, affordable)
        return min(self._max_tokens, num_decode_rows + prefill_tokens)
