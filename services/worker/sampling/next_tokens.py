"""What a matcher allows next, as bits over the vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

Bits = npt.NDArray[np.int32]


class NextTokens:
    """Fills lines of bitmasks: bit ``v % 32`` of word ``v // 32`` is set if token ``v`` is allowed.

    Attributes:
        only_end: ``[ceil(vocab_size / 32)]``: the line that allows end-of-sequence tokens alone.
    """

    def __init__(self, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """
        Args:
            vocab_size: Width of the logits.
            eos_token_ids: All end-of-sequence ids of the model.
        """
        self.only_end = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        bits = self.only_end.view(np.uint32)
        for token_id in eos_token_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)

    def lines(self, count: int) -> Bits:
        """``[count, ceil(vocab_size / 32)]`` that allow nothing."""
        return np.zeros((count, self.only_end.size), dtype=np.int32)

    def fill(self, matcher: LLMatcher, bitmask: Bits, line: int) -> str:
        """Say what may come next.

        Args:
            matcher: Where the text stands; it does not move.
            bitmask: Of ``lines``; the line allows nothing yet, and still does if this fails.
            line: Which one to fill.

        Returns:
            Why there is no way on; "" if there is one.
        """
        if matcher.is_error():
            return error_of(matcher)
        if matcher.is_stopped():  # it takes no more tokens, but has not ended the text
            bitmask[line] = self.only_end
            return ""
        fill_next_token_bitmask(matcher, bitmask, line)
        if (bitmask[line] & ~self.only_end).any() or matcher.is_accepting():
            return ""
        # The library allows the end where it fails, also of a text that is not complete.
        bitmask[line] = 0
        return error_of(matcher) or "it is too large, or no text that goes on from here matches it"


def error_of(matcher: LLMatcher) -> str:
    """Why a matcher has failed; "" if it has not."""
    if not matcher.is_error():
        return ""
    # The library appends a dump of its state, which holds the output.
    message = matcher.get_error().partition("<state>")[0].strip()
    return "no text matches it" if message == "NoExtensionBias" else message
