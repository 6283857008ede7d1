"""What one API key may use: requests at one time, and tokens per minute.

Tokens are a bucket per key that holds a minute's worth and fills evenly. A request enters while
there is something in it and takes out what it uses as it comes. No request is cut off half-way: the
bucket may owe, and the next request waits until it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.errors import Overloaded

CODE = "rate_limit_exceeded"
SECONDS_PER_MINUTE = 60.0
RETRY_AFTER_S = 1.0
"""For a key whose requests are all running: nobody knows when the next one ends."""


@dataclass(slots=True)
class _Account:
    """What a key uses now, and what it has left.

    Attributes:
        tokens: In the bucket at ``counted_at``; below 0 = owed.
        counted_at: Seconds on the limits' clock.
    """

    num_in_flight: int
    tokens: float
    counted_at: float


class KeyLimits:
    """The same limits for every key, counted for each by itself."""

    def __init__(
        self,
        *,
        max_in_flight: int | None,
        max_tokens_per_minute: int | None,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            max_in_flight: Most requests of a key at one time; ``None`` = any number.
            max_tokens_per_minute: Prompt and output tokens of a key; ``None`` = any number.
            clock: Seconds that only grow.
        """
        self._max_in_flight = max_in_flight
        self._tokens_per_minute = max_tokens_per_minute
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def slot(self, tenant: str) -> Iterator[None]:
        """Be inside for the length of a request.

        Args:
            tenant: Label of the key; there are as many as there are keys.

        Raises:
            Overloaded: The key has too many requests inside, or has used up its tokens.
        """
        account = self._account(tenant)
        self._check_in_flight(account)
        self._check_tokens(account)
        account.num_in_flight += 1
        try:
            yield
        finally:
            account.num_in_flight -= 1

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Take out what a request of a key has used since it was last charged."""
        if self._tokens_per_minute is not None:
            self._account(tenant).tokens -= num_tokens

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            full = float(self._tokens_per_minute or 0)
            account = self._accounts[tenant] = _Account(0, full, self._clock())
        return account

    def _check_in_flight(self, account: _Account) -> None:
        if self._max_in_flight is not None and account.num_in_flight >= self._max_in_flight:
            raise Overloaded(
                f"this API key has {account.num_in_flight} requests running, as many as it may; "
                "try again when one has ended",
                retry_after_s=RETRY_AFTER_S,
                code=CODE,
            )

    def _check_tokens(self, account: _Account) -> None:
        limit = self._tokens_per_minute
        if limit is None:
            return
        rate = limit / SECONDS_PER_MINUTE
        now = self._clock()
        account.tokens = min(account.tokens + (now - account.counted_at) * rate, float(limit))
        account.counted_at = now
        if account.tokens <= 0:
            raise Overloaded(
                f"this API key has used up its {limit} tokens per minute",
                retry_after_s=-account.tokens / rate,
                code=CODE,
            )
