"""Checks a request against one engine, and sets what that engine decides for it."""

from __future__ import annotations

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import QueuePolicy, fcfs, priority_with_aging
from services.scheduler.core.stop import set_stop_rules


class Intake:
    """The door of one engine."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._policy: QueuePolicy = (
            fcfs if limits.policy == "fcfs" else priority_with_aging(limits.priority_aging_s)
        )
        self._num_slots = limits.num_usable_blocks * limits.block_size

    def check(self, request: Request) -> None:
        """Refuse what cannot be served; accept the rest by setting rank, end and stop rules.

        Raises:
            ContextLengthExceeded: The request can never fit the context or the pool, even alone.
            InvalidRequest: The prompt is empty, a token id unknown, or a priority is not supported.
        """
        self._check_values(request)
        request.rank = (self._policy(request), request.handle)
        set_stop_rules(
            request,
            eos_token_ids=self._limits.eos_token_ids,
            max_total_tokens=self._max_total_tokens(request),
        )

    def _check_values(self, request: Request) -> None:
        if request.num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        vocab_size = self._limits.vocab_size
        for token_id in (min(request.token_ids), max(request.token_ids)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"prompt: token id {token_id} is not in 0..{vocab_size - 1}", param="prompt"
                )
        request.sampling.validate_token_ids(vocab_size)
        if request.priority and self._limits.policy == "fcfs":
            raise InvalidRequest(
                f"priority {request.priority} needs the scheduling policy 'priority'",
                param="priority",
            )

    def _max_total_tokens(self, request: Request) -> int:
        """Prompt and output together; without ``max_tokens`` as many as fit."""
        if request.pools:
            self._require_room(request, request.num_prompt_tokens, param="prompt")
            return request.num_prompt_tokens + 1  # the vector counts like an output token
        max_tokens = request.sampling.max_tokens
        wanted = request.num_prompt_tokens + (1 if max_tokens is None else max_tokens)
        param = "prompt" if max_tokens is None else "max_tokens"
        self._require_room(request, wanted, param=param)
        if max_tokens is not None:
            return wanted
        return min(self._limits.max_model_len, self._num_slots + 1)

    def _require_room(self, request: Request, wanted: int, *, param: str) -> None:
        asked = (
            f"{request.num_prompt_tokens} prompt tokens and "
            f"{wanted - request.num_prompt_tokens} output tokens"
        )
        if wanted > self._limits.max_model_len:
            raise ContextLengthExceeded(
                f"the maximum context length is {self._limits.max_model_len} tokens, "
                f"but the request needs {wanted} ({asked})",
                param=param,
            )
        # The last output token's KV is never needed.
        if max(wanted - 1, request.num_prompt_tokens if request.pools else 0) > self._num_slots:
            raise ContextLengthExceeded(
                f"the KV cache holds {self._num_slots} tokens, "
                f"but the request needs {wanted} ({asked}) and could never be served",
                param=param,
            )
