"""The grammars of the rows: what each allows next, and how far each has come.

A matcher lives on the host and follows the tokens as they are read, so a row with a grammar is the
one place where sampled values are needed on the host before the row can sample again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from llguidance import LLMatcher

from services.common.errors import InvalidRequest, InvariantError
from services.worker.sampling.base import Ints, to_device
from services.worker.sampling.grammar_mask import GrammarMask
from services.worker.sampling.next_tokens import NextTokens, error_of


class RowGrammars:
    """Prepared grammars by their number, and a copy of one for each row that has a grammar."""

    def __init__(
        self, *, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        """
        Args:
            vocab_size: Width of the logits.
            eos_token_ids: All end-of-sequence ids of the model; one ends a row's grammar.
            device: Where the logits are.
        """
        self._device = device
        self._eos_token_ids = frozenset(eos_token_ids)
        self._next = NextTokens(vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._prepared: dict[int, LLMatcher] = {}
        self._rows: dict[int, LLMatcher] = {}
        self._stuck: dict[int, str] = {}  # rows that have no way on, and why

    def install(self, ref: int, matcher: LLMatcher) -> None:
        """Rows may name this grammar from now on."""
        self._prepared[ref] = matcher

    def drop(self, refs: Iterable[int]) -> None:
        """No new row names these grammars any more; rows that have one keep their copy."""
        for ref in refs:
            self._prepared.pop(ref, None)

    def reset(self) -> None:
        """Drop all prepared grammars."""
        self._prepared.clear()

    def add(self, row: int, ref: int, output_ids: list[int]) -> None:
        """Give a row its grammar.

        Args:
            row: It has none.
            ref: What ``install`` was called with.
            output_ids: Known outputs of the request, which the grammar has allowed in an earlier
                life of it.

        Raises:
            InvariantError: No such grammar is prepared.
        """
        prepared = self._prepared.get(ref)
        if prepared is None:
            raise InvariantError(f"grammar {ref} is not prepared")
        matcher = prepared.deep_copy()
        # What it does not take leaves it in an error state, which ends the row at its next token.
        matcher.consume_tokens([i for i in output_ids if i not in self._eos_token_ids])
        self._rows[row] = matcher

    def remove(self, row: int) -> None:
        """Forget a row; it may have no grammar."""
        self._rows.pop(row, None)
        self._stuck.pop(row, None)

    def lines_of(self, rows: Ints) -> list[int]:
        """Which of some rows have a grammar."""
        if not self._rows:
            return []
        return [line for line, row in enumerate(rows.tolist()) if row in self._rows]

    def mask(self, rows: Ints) -> GrammarMask | None:
        """What the grammars of some rows allow next; ``None`` if none has one.

        A grammar that has failed allows nothing.
        """
        lines = self.lines_of(rows)
        if not lines:
            return None
        bitmask = self._next.lines(len(lines))
        for i, line in enumerate(lines):
            row = int(rows[line])
            if row not in self._stuck and (why := self._next.fill(self._rows[row], bitmask, i)):
                self._stuck[row] = why
        ends = ~(bitmask & ~self._next.only_end).any(axis=1) & bitmask.any(axis=1)
        index = np.array(lines, dtype=np.int64)
        return GrammarMask(
            lines=to_device(index, self._device),
            bitmask=torch.from_numpy(bitmask).to(self._device),
            ending_lines=index[ends],
        )

    def advance(self, row: int, token_id: int) -> bool:
        """Follow a row's sampled token.

        Returns:
            Whether the grammar has ended with it. One that cannot follow fails: see ``failure_of``.
        """
        matcher = self._rows.get(row)
        if matcher is None:
            return False
        if token_id in self._eos_token_ids:
            return True
        matcher.consume_token(token_id)
        return False

    def failure_of(self, row: int) -> InvalidRequest | None:
        """Why a row's grammar has failed; ``None`` if it has not."""
        matcher = self._rows.get(row)
        if matcher is None or not (why := self._stuck.get(row) or error_of(matcher)):
            return None
        return InvalidRequest(f"the constraint cannot be followed: {why}", param="constraint")
