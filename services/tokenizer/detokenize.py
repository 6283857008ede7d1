"""Turns the output tokens of one choice into text, token by token.

Joined, the pieces are the decoder's text of the whole output, whatever the chunks: a character
whose bytes are spread over several tokens comes out when it is complete, U+FFFD only for bytes that
cannot become a character, and nothing of the prompt.

Two ways, one seam. Where tokens are bytes (``token_bytes.py``; every byte-level and SentencePiece
tokenizer) an incremental UTF-8 decoder does it in a fraction of a microsecond and cannot fail.
Other decoders look at neighbours: there a window of tokens is decoded again and the difference is
the piece.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from services.tokenizer.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes, so also the most tokens that one character is spread over
_WINDOW_PROMPT_TOKENS = 6
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text of one choice."""

    def step(self, token_id: int) -> str:
        """The text that this token completes; perhaps none."""

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for an incomplete character. Call it last."""


def new_detokenizer(
    tokenizer: Tokenizer,
    table: TokenBytes,
    *,
    prompt_ids: Sequence[int],
    skip_special_tokens: bool,
) -> Detokenizer:
    """Start the text of one choice.

    Args:
        tokenizer: The model's.
        table: Its ``token_bytes``.
        prompt_ids: What the output follows. A character that the prompt left incomplete is
            completed by the output; nothing else of the prompt enters.
        skip_special_tokens: Whether special tokens have no text.
    """
    if not table.is_exact:
        return WindowDetokenizer(
            tokenizer, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens
        )
    rows = table.skipped if skip_special_tokens else table.shown
    return ByteDetokenizer(rows, prompt_ids=prompt_ids)


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes."""

    __slots__ = ("_decode", "_decoder", "_prompt_tail", "_rows")

    def __init__(self, rows: Sequence[bytes], *, prompt_ids: Sequence[int]) -> None:
        """
        Args:
            rows: Bytes of each token id.
            prompt_ids: See ``new_detokenizer``.
        """
        self._rows = rows
        self._decoder = _new_decoder(errors="replace")
        self._decode = self._decoder.decode
        self._prompt_tail = _incomplete_tail(rows, prompt_ids)

    def step(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        raw = self._rows[token_id]
        if self._prompt_tail and raw:
            self._resume_prompt_character(raw)
        return self._decode(raw)

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._decode(b"", True)

    def _resume_prompt_character(self, raw: bytes) -> None:
        """Take over the prompt's incomplete character if the output goes on with it."""
        tail, self._prompt_tail = self._prompt_tail, b""
        longer = tail + raw[:1]
        if _incomplete_length(longer) == len(longer) or _is_utf8(longer):
            self._decode(tail)


class WindowDetokenizer:
    """For decoders that must see the neighbours of a token.

    Follows the two-offset method of text-generation-inference: tokens before ``_read`` have been
    given out as text; those from ``_prefix`` on are decoded again as the context of what follows.
    """

    __slots__ = ("_context", "_new", "_skip", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        """
        Args:
            tokenizer: The model's.
            prompt_ids: See ``new_detokenizer``.
            skip_special_tokens: Whether special tokens have no text.
        """
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = list(prompt_ids[-_WINDOW_PROMPT_TOKENS:])
        self._new: list[int] = []

    def step(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        self._new.append(token_id)
        piece = self._piece()
        if piece.endswith(REPLACEMENT) and len(self._new) < _LONGEST_CHARACTER:
            return ""
        return self._give_out(piece)

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._give_out(self._piece()) if self._new else ""

    def _piece(self) -> str:
        before = self._text(self._context)
        return self._text(self._context + self._new)[len(before) :]

    def _give_out(self, piece: str) -> str:
        if piece:
            self._context, self._new = self._new, []
        return piece

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _incomplete_tail(rows: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
    """Bytes of the incomplete character at the end of a sequence; empty if there is none."""
    tail = b""
    for token_id in reversed(token_ids):
        tail = rows[token_id] + tail
        if len(tail) >= _LONGEST_CHARACTER:
            break
    length = _incomplete_length(tail)
    return tail[len(tail) - length :]


def _incomplete_length(raw: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character that is not complete."""
    for length in range(1, min(len(raw), _LONGEST_CHARACTER - 1) + 1):
        decoder = _new_decoder(errors="strict")
        start = raw[len(raw) - length :]
        if start[0] >= 0xC0:
            try:
                return 0 if decoder.decode(start) else length
            except UnicodeDecodeError:
                return 0
        if start[0] < 0x80:
            return 0
    return 0


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
