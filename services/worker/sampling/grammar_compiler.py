"""Compiles constraints to matchers over this model's vocabulary, off the step path."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from services.common.errors import InvalidRequest
from services.common.grammar import grammar_of
from services.common.sampling import Constraint

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
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def warm(self) -> None:
        """Read the vocabulary, which takes a fraction of a second, before a request needs it."""
        with self._lock:
            self._vocabulary()

    def compile(self, constraint: Constraint) -> LLMatcher:
        """The matcher of a constraint at its beginning; copy it before use.

        Raises:
            InvalidRequest: The constraint cannot be enforced, or is beyond the library's bounds.
        """
        with self._lock:
            matcher = self._kept.get(constraint)
            if matcher is None:
                matcher = LLMatcher(self._vocabulary(), grammar_of(constraint))
                if matcher.is_error():
                    raise InvalidRequest(
                        f"the constraint cannot be compiled: {matcher.get_error()}",
                        param="constraint",
                    )
                self._kept[constraint] = matcher
                if len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(constraint)
            return matcher

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                str(self._tokenizer_file),
                n_vocab=self._vocab_size,
                eos_token=list(self._eos_token_ids),
            )
        return self._tokenizer
