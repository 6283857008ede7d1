"""The text of one choice: detokenized, searched for stop strings, released as far as it is certain.

Equal for any chunking: tokens are taken one by one, and the first ``min_tokens`` of them are never
part of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.tokenizer.detokenize import Detokenizer
from services.tokenizer.stop import StopSearch


@dataclass(frozen=True, slots=True)
class Released:
    """What some tokens made certain.

    Attributes:
        text: To be shown now.
        num_tokens: How many of the tokens were used: all, or up to the one that completed a stop
            string.
        stop: The stop string that ended the text.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class TextOutput:
    """Feed tokens until a stop string ends the text, or ``finish``."""

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_min_tokens", "_num_tokens", "_search")

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """
        Args:
            detokenizer: Fresh, and of this choice alone.
            stops: Stop strings, none of them "".
            include_stop: Whether the stop string is part of the text.
            min_tokens: The text of so many first tokens is not searched.
        """
        self._detokenizer = detokenizer
        self._search = StopSearch(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""

    def feed(self, token_ids: Sequence[int]) -> Released:
        """Take the next tokens. Not to be called again once a stop string was found.

        Args:
            token_ids: In order; those after the one that completes a stop string are not looked at.
        """
        step = self._detokenizer.step
        if self._search is None:
            return Released("".join([step(token_id) for token_id in token_ids]), len(token_ids))
        text = ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            released, stop = self._search_in(step(token_id), self._search)
            text += released
            if stop is not None:
                return Released(text, num_tokens, stop)
        return Released(text, len(token_ids))

    def finish(self) -> str:
        """The rest of the text: what was held back, and U+FFFD for an incomplete character."""
        rest = self._held + self._detokenizer.flush()
        self._held = ""
        return rest

    def _search_in(self, piece: str, search: StopSearch) -> tuple[str, str | None]:
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            return piece, None
        hit = search.feed(piece)
        if hit is None:
            text = self._held + piece
            cut = len(text) - (0 if self._include_stop else search.num_held)
            self._held = text[cut:]
            return text[:cut], None
        text = self._held + piece[: hit.end]
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(hit.stop)], hit.stop
