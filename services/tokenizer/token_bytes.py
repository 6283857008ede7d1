"""The bytes that each token id stands for, read off a tokenizer's own decoder.

A byte-level or SentencePiece decoder maps every token to bytes without looking at its neighbours;
the text of a sequence is those bytes joined and read as UTF-8. Other decoders (WordPiece, say)
cannot be taken apart so: they have no table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ToBytes = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What tokens look like as bytes.

    Attributes:
        shown: Per token id, its bytes; empty for ids that the tokenizer does not know.
        skipped: The same, but special tokens are empty.
        is_exact: Whether joining the bytes and reading them as UTF-8 gives the decoder's text. If
            not, the bytes are good for showing one token alone, not for making text.
    """

    shown: Sequence[bytes]
    skipped: Sequence[bytes]
    is_exact: bool


def token_bytes(tokenizer: Tokenizer, *, vocab_size: int) -> TokenBytes:
    """Build the table of a tokenizer.

    Args:
        tokenizer: Any tokenizer of the ``tokenizers`` library.
        vocab_size: Rows of the model's output layer; may be more than the tokenizer has tokens.
    """
    to_bytes = _decoder_to_bytes(json.loads(tokenizer.to_str()).get("decoder"))
    special = {
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(size)]
    spell = to_bytes or str.encode
    shown = [spell(token) if token is not None else b"" for token in tokens]
    skipped = [b"" if token_id in special else raw for token_id, raw in enumerate(shown)]
    return TokenBytes(shown, skipped, is_exact=to_bytes is not None)


def _decoder_to_bytes(decoder: dict[str, Any] | None) -> ToBytes | None:
    """How the decoder spells a token inside a text; ``None`` = it needs the neighbours."""
    parts = _flatten(decoder)
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return _from_byte_level
    if not kinds or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    replacements = [
        _replacement(part) for part in parts if part["type"] in ("Replace", "Metaspace")
    ]
    if None in replacements or not _strips_only_the_start(parts):
        return None
    pairs = [pair for pair in replacements if pair is not None]
    has_byte_tokens = "ByteFallback" in kinds
    return lambda token: _from_pieces(token, pairs, has_byte_tokens=has_byte_tokens)


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flatten(inner)]
    return [decoder]


def _replacement(part: dict[str, Any]) -> tuple[str, str] | None:
    if part["type"] == "Metaspace":
        return part["replacement"], " "
    pattern = part["pattern"].get("String")
    return None if pattern is None else (pattern, part["content"])


def _strips_only_the_start(parts: list[dict[str, Any]]) -> bool:
    """Whether Strip, if there, removes only the first space of the whole text (it follows Fuse)."""
    kinds = [part["type"] for part in parts]
    return all(
        part["stop"] == 0 and "Fuse" in kinds[:index]
        for index, part in enumerate(parts)
        if part["type"] == "Strip"
    )


def _from_pieces(token: str, pairs: Sequence[tuple[str, str]], *, has_byte_tokens: bool) -> bytes:
    if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    for old, new in pairs:
        token = token.replace(old, new)
    return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map of characters to bytes; bytes that are not printable were moved up to U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(moved)}


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token, which is spelled as it is
        return token.encode()
