"""Which tokens would spell a banned word: every way in which the vocabulary can write it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from services.common.errors import InvalidRequest
from services.common.sampling import BadWord
from services.tokenizer.encode import Encoder


class BadWordSpeller:
    """Spells words in tokens. May be called from any thread."""

    def __init__(self, encoder: Encoder) -> None:
        """
        Args:
            encoder: The model's tokenizer.
        """
        self._encoder = encoder

    def spell(self, words: Sequence[str]) -> tuple[BadWord, ...]:
        """All spellings of words, at the start of a text and after a space.

        Raises:
            InvalidRequest: A word has no tokens.
        """
        found: dict[BadWord, None] = {}
        for word in words:
            bare = word.lstrip() or word
            graphs = [*self._graphs(bare), *self._graphs(" " + bare)]
            if not graphs:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens", param="bad_words")
            found.update(dict.fromkeys(graphs))
        return tuple(found)

    def _graphs(self, text: str) -> list[BadWord]:
        """All spellings, and beside them the tokenizer's own where it writes another text."""
        own_ids = self._encoder.encode_now(text, add_special_tokens=False, param="bad_words")
        raw, table = text.encode(), self._encoder.token_bytes
        spellings = self._spellings(raw) if table.is_exact else None
        own_raw = b"".join(table.shown[token_id] for token_id in own_ids)
        is_known = spellings is not None and own_raw == raw
        own = BadWord.of_tokens(*own_ids) if own_ids and not is_known else None
        return [graph for graph in (spellings, own) if graph is not None]

    def _spellings(self, raw: bytes) -> BadWord | None:
        """The graph of all token sequences whose bytes are ``raw``; ``None`` if there is none."""
        ends_a_spelling = {len(raw)}
        edges: list[tuple[int, int, int]] = []
        # Backwards: an edge is of use if the end can be reached from where it leads.
        for start in reversed(range(len(raw))):
            for end in range(start + 1, min(start + self._longest, len(raw)) + 1):
                token_ids = self._ids_of.get(raw[start:end], ()) if end in ends_a_spelling else ()
                edges += [(start, token_id, end) for token_id in token_ids]
            if edges and edges[-1][0] == start:
                ends_a_spelling.add(start)
        begun = {0}
        kept: list[tuple[int, int, int]] = []
        for edge in sorted(edges):
            if edge[0] in begun:
                begun.add(edge[2])
                kept.append(edge)
        if not kept:
            return None
        starts, token_ids, ends = zip(*kept, strict=True)
        return BadWord(starts, token_ids, ends)

    @cached_property
    def _ids_of(self) -> Mapping[bytes, list[int]]:
        """Token ids by what they look like."""
        found: defaultdict[bytes, list[int]] = defaultdict(list)
        for token_id, raw in enumerate(self._encoder.token_bytes.shown):
            if raw:
                found[raw].append(token_id)
        return dict(found)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids_of), default=0)
