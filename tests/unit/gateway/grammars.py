"""Constraints tried on a vocabulary of single bytes and the marks of thoughts."""

from __future__ import annotations

import json
import re
from functools import cache

from llguidance import LLMatcher, LLTokenizer

from services.common.convert import constraint_from_message
from services.common.grammar import check, grammar_of
from services.common.pb import tokenizer_pb2

MARKS = {"<think>": 256, "</think>": 257}
EOS = 258
_PIECES = re.compile("(" + "|".join(MARKS) + ")")


@cache
def _vocabulary() -> LLTokenizer:
    added = [
        {"id": token_id, "content": text, "special": text == "<eos>"} | _PLAIN
        for text, token_id in {**MARKS, "<eos>": EOS}.items()
    ]
    spelled = {char: byte for byte, char in enumerate(_alphabet())}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": spelled, "merges": []}
    described = {"version": "1.0", "added_tokens": added, "model": model, "decoder": level}
    return LLTokenizer(json.dumps(described), n_vocab=EOS + 1, eos_token=EOS)


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _alphabet() -> list[str]:
    """How byte-level BPE writes each byte."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def accepts(
    request: tokenizer_pb2.GenerateRequest, text: str, *, marks_are_tokens: bool = False
) -> bool:
    """Whether the constraint of a request lets a text through to its end.

    Args:
        request: With a constraint.
        text: What the model says.
        marks_are_tokens: Whether it says each mark as one token; else letter by letter.
    """
    constraint = constraint_from_message(request.constraint)
    assert constraint is not None
    check(constraint)
    matcher = LLMatcher(_vocabulary(), grammar_of(constraint))
    assert not matcher.is_error(), matcher.get_error()
    ids = _ids(text) if marks_are_tokens else list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _ids(text: str) -> list[int]:
    pieces = _PIECES.split(text)
    return [i for piece in pieces for i in ([MARKS[piece]] if piece in MARKS else piece.encode())]
