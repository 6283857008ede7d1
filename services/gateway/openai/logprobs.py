"""Log-probabilities in OpenAI's two shapes and vLLM's.

A token may be part of a character. Its ``bytes`` are always its own; its text is what it completes:
"" for the first bytes of a character, the whole character for the last, U+FFFD for the last token
of a choice that ends inside a character. So the texts of the tokens of a choice, joined, are the
text of the choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from services.gateway.generation import TokenLogprob, TopToken

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenNames:
    """Names the tokens of one choice, in order."""

    def __init__(self, *, as_token_ids: bool) -> None:
        """
        Args:
            as_token_ids: Write "token_id:N" instead of text.
        """
        self._as_ids = as_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_id: int, token_bytes: bytes, *, is_last: bool = False) -> str:
        """The name of the choice's next token; ``is_last`` if none follows."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._decoder.decode(token_bytes, is_last)

    def alone(self, token_id: int, token_bytes: bytes) -> str:
        """The name of a token that was not taken; part of a character is written as its bytes."""
        if self._as_ids:
            return f"token_id:{token_id}"
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def chat_entries(
    entries: Sequence[TokenLogprob], names: TokenNames, *, num_top: int, is_end: bool
) -> list[dict[str, Any]]:
    """``logprobs.content`` of chat.

    Args:
        entries: Of the next tokens.
        names: Of this choice.
        num_top: Alternatives per token.
        is_end: Whether the choice ends with them.
    """
    return [
        {
            "token": names.next(entry.token_id, entry.token_bytes, is_last=is_last),
            "logprob": finite(entry.logprob),
            "bytes": list(entry.token_bytes),
            "top_logprobs": [_chat_top(top, names) for top in entry.top[:num_top]],
        }
        for entry, is_last in _marked(entries, is_end)
    ]


def _marked(entries: Sequence[TokenLogprob], is_end: bool) -> Iterator[tuple[TokenLogprob, bool]]:
    """Each entry, and whether it is the last of its choice."""
    last = len(entries) - 1 if is_end else -1
    return ((entry, index == last) for index, entry in enumerate(entries))


def _chat_top(top: TopToken, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.alone(top.token_id, top.token_bytes),
        "logprob": finite(top.logprob),
        "bytes": list(top.token_bytes),
    }


class CompletionLogprobs:
    """``logprobs`` of one choice of completions; grows with the choice."""

    def __init__(self, names: TokenNames, *, num_top: int) -> None:
        """
        Args:
            names: Of this choice.
            num_top: Alternatives per token.
        """
        self._names = names
        self._num_top = num_top
        self._offset = 0

    def rows(self, entries: Sequence[TokenLogprob], *, is_end: bool = False) -> dict[str, Any]:
        """The columns of the next tokens; offsets go on from the tokens before.

        Args:
            entries: Of these tokens.
            is_end: Whether the choice ends with them.
        """
        columns = _empty_columns()
        for entry, is_last in _marked(entries, is_end):
            name = self._names.next(entry.token_id, entry.token_bytes, is_last=is_last)
            self._add(columns, name, finite(entry.logprob), self._top_of(entry))
        return columns

    def first_of_prompt(self, token_id: int, token_bytes: bytes) -> dict[str, Any]:
        """The columns of a prompt's first token, which nothing predicts."""
        columns = _empty_columns()
        name = self._names.next(token_id, token_bytes)
        self._add(columns, name, None, None)
        return columns

    def _add(
        self,
        columns: dict[str, Any],
        name: str,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        columns["tokens"].append(name)
        columns["token_logprobs"].append(logprob)
        columns["top_logprobs"].append(top)
        columns["text_offset"].append(self._offset)
        self._offset += len(name)

    def _top_of(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the one that was taken, even where it is not among them."""
        top = {
            self._names.alone(top.token_id, top.token_bytes): finite(top.logprob)
            for top in entry.top[: self._num_top]
        }
        taken = self._names.alone(entry.token_id, entry.token_bytes)
        top.setdefault(taken, finite(entry.logprob))
        return top


def _empty_columns() -> dict[str, Any]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def join_columns(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several parts of one choice's columns as one."""
    joined = _empty_columns()
    for part in parts:
        for name, column in joined.items():
            column.extend(part[name])
    return joined


def prompt_logprobs(
    entries: Sequence[TokenLogprob], *, num_top: int, as_token_ids: bool
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: null for the first token, then token id → what is known of it."""
    names = TokenNames(as_token_ids=as_token_ids)
    return [None, *(_prompt_entry(entry, names, num_top=num_top) for entry in entries)]


def _prompt_entry(entry: TokenLogprob, names: TokenNames, *, num_top: int) -> dict[str, Any]:
    tops = {
        str(top.token_id): {
            "logprob": finite(top.logprob),
            "rank": rank,
            "decoded_token": names.alone(top.token_id, top.token_bytes),
        }
        for rank, top in enumerate(entry.top[:num_top], start=1)
    }
    tops[str(entry.token_id)] = {
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "decoded_token": names.next(entry.token_id, entry.token_bytes),
    }
    return tops


def finite(logprob: float) -> float:
    """A log-probability that JSON can say; NaN becomes the lowest, rounding above 0 becomes 0."""
    return min(logprob, 0.0) if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
