"""How long a step takes, learnt from the steps so far.

Model: ``time = decode_s + prefill_tokens * prefill_token_s``. ``decode_s`` is what a step of
decoding rows takes (weights must be read whatever the batch), tracked as a moving average because
it follows the batch and its context lengths; ``prefill_token_s`` is fitted on the steps that hold
prompt tokens. Two numbers that are always known separately beat a regression, which loses its slope
while nothing but decodes run.

A few prompt tokens beside decodes seem to cost next to nothing: the weights are read anyway, and
the processor has time to spare. Many do cost. So what few have taught says little of many: larger
steps outweigh smaller ones, and nothing is foretold far beyond the size that was learnt from: up to
twice that size, what was free before can be missed by one step of decoding, not more. Who has more
to win by a large step than to lose by a late one may be bolder.
"""

from __future__ import annotations

_DECODE_MEMORY = 0.9  # weight of the past in the moving average, per step
_PREFILL_MEMORY = 0.8  # the same, per step of the usual size; a step of twice that counts as four
_REACH = 2.0  # times the usual size


class StepCostModel:
    """Predicts device time; feed it every applied step."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0
        self._usual_prefill_tokens = 0.0
        self._decode_rows = 0.0

    def observe(self, *, num_decode_rows: int, num_prefill_tokens: int, device_s: float) -> None:
        """Learn from one step.

        Args:
            num_decode_rows: Rows that computed one token.
            num_prefill_tokens: Tokens of the other rows.
            device_s: Time in forward and sampling; 0 (not measured) teaches nothing.
        """
        if device_s <= 0.0:
            return
        if num_prefill_tokens:
            share_s = device_s
            if num_decode_rows and self._decode_s is not None:
                share_s = max(0.1 * device_s, device_s - self._decode_s)
            self._observe_prefill(num_prefill_tokens, share_s)
        elif num_decode_rows:
            self._decode_s = _averaged(self._decode_s, device_s)
            self._decode_rows = _averaged(self._decode_rows or None, float(num_decode_rows))

    def _observe_prefill(self, num_tokens: int, share_s: float) -> None:
        usual = self._usual_prefill_tokens or float(num_tokens)
        memory = _PREFILL_MEMORY ** ((num_tokens / usual) ** 2)
        self._prefill_s = memory * self._prefill_s + share_s
        self._prefill_tokens = memory * self._prefill_tokens + num_tokens
        self._usual_prefill_tokens = memory * usual + (1.0 - memory) * num_tokens

    def predict(self, *, num_decode_rows: int, num_prefill_tokens: int) -> float:
        """Expected device time in seconds; 0 where nothing has been measured."""
        decode_s = self.decode_s if num_decode_rows else 0.0
        return decode_s + num_prefill_tokens * self._prefill_token_s

    def prefill_tokens_in(self, seconds: float, *, boldness: float = 1.0) -> int | None:
        """Prompt tokens that take so long, as far as can be told; None if none were measured.

        Args:
            seconds: The time.
            boldness: How many times as far as else to go beyond what was learnt from.
        """
        if not self._prefill_token_s:
            return None
        reach = _REACH * boldness * self._usual_prefill_tokens
        return int(min(seconds / self._prefill_token_s, reach))

    @property
    def decode_s(self) -> float:
        """What a step of decoding rows takes; 0 = not measured."""
        return self._decode_s or 0.0

    @property
    def _prefill_token_s(self) -> float:
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens a second; 0 = not measured."""
        return 1.0 / self._prefill_token_s if self._prefill_token_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Output tokens a second of all decoding rows together; 0 = not measured."""
        return self._decode_rows / self._decode_s if self._decode_s else 0.0


def _averaged(before: float | None, value: float) -> float:
    if before is None:
        return value
    return _DECODE_MEMORY * before + (1.0 - _DECODE_MEMORY) * value
