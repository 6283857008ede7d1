"""Compiles constraints to matchers over this model's vocabulary, off the step path."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from services.common.grammar import grammar_of, refusal
from services.common.sampling import Constraint
from services.worker.sampling.next_tokens import NextTokens

_MAX_KEPT = 256
"""Compiled grammars that are kept for the next request with the same constraint."""


class GrammarCompiler:
    """May be called from any thread; one call works at a time."""

    def __init__(
        self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """
        Args:
            tokenizer_file: The model's tokenizer.json; read at the first ``compile`` or ``warm``.
            vocab_size: Width of the logits.
            eos_token_ids: All end-of-sequence ids of the model.
        """
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._next = NextTokens(vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def warm(self) -> None:
        """Read the vocabulary, which takes a fraction of a second, before a request needs it."""
        with self._lock:
            self._vocabulary()

    def compile(self, constraint: Constraint) -> LLMatcher:
        """The matcher of a constraint at its beginning; copy it before use.

        What the first token may be is worked out here as well: most of a lexer's work is in it, up
        to about a second, and what no text matches shows there.

        Raises:
            InvalidRequest: The constraint cannot be enforced, or is beyond the library's bounds.
        """
        with self._lock:
            matcher = self._kept.get(constraint)
            if matcher is None or self._failure_of(matcher):
                matcher = LLMatcher(self._vocabulary(), grammar_of(constraint), log_level=0)
                if why := self._failure_of(matcher):
                    raise refusal(constraint, why)
                self._kept[constraint] = matcher
                if len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(constraint)
            return matcher

    def _failure_of(self, matcher: LLMatcher) -> str:
        # Copies share a lexer. Where it fails over one, the next is told.
        fill = partial(self._next.fill, bitmask=self._next.lines(1), line=0)
        return fill(matcher.deep_copy()) or fill(matcher.deep_copy())

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                str(self._tokenizer_file),
                n_vocab=self._vocab_size,
                eos_token=list(self._eos_token_ids),
            )
        return self._tokenizer
