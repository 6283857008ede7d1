"""``bad_words``: a token that would complete a banned word in the output is banned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from services.common.sampling import BadWord, SamplingParams
from services.worker.sampling.base import Ints, LogitRows, to_device

_NO_TOKEN = -1
_ROOT = 0


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of one row in one graph. Node 0 is where all of them begin.

    Attributes:
        edges: ``[num_edges, 3]``: from node, by token, to node; those inside words.
        last_edges: ``[num_last_edges, 2]``: from node, by token; those that complete a word.
        num_nodes: The root included.
        depth: Tokens before the last one of the longest spelling.
    """

    edges: Ints
    last_edges: Ints
    num_nodes: int
    depth: int


class BadWords:
    """Walks the tail of each output through the graph of its row's words.

    Only outputs count: a word that the prompt begins may be finished.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_row: dict[int, _Words] = {}

    def add(self, row: int, params: SamplingParams) -> bool:
        """See ``LogitsTransform``."""
        self.remove(row)
        if params.bad_words:
            self._of_row[row] = _merge(params.bad_words)
        return bool(params.bad_words)

    def remove(self, row: int) -> None:
        """See ``LogitsTransform``."""
        self._of_row.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """See ``LogitsTransform``."""
        if not self._of_row:
            return
        lines = [i for i, row in enumerate(rows.rows.tolist()) if row in self._of_row]
        if not lines:
            return
        index = np.array(lines, dtype=np.int64)
        words = [self._of_row[row] for row in rows.rows[index].tolist()]
        is_live = self._walk(words, self._tails(rows.take(index), max(w.depth for w in words)))
        last, sizes = _side_by_side([w.last_edges for w in words], words)
        from_nodes, token_ids = to_device(last, self._device).unbind(1)
        # Added, not assigned: two words may share their last token.
        ban = torch.where(is_live[from_nodes], -torch.inf, 0.0)
        at = to_device(np.repeat(index, sizes), self._device)
        logits.index_put_((at, token_ids), ban, accumulate=True)

    def _tails(self, rows: LogitRows, depth: int) -> torch.Tensor:
        """``[n, up to depth]``: the last output tokens of each row, the newest last."""
        depth = min(depth, int(rows.num_outputs.max()))
        back = np.arange(depth, 0, -1)
        lines = to_device(rows.rows, self._device).unsqueeze(1)
        places = to_device(rows.num_known[:, None] - back, self._device)
        is_prompt = to_device(rows.num_outputs[:, None] - back, self._device) < 0
        return rows.token_ids[lines, places.clamp(min=0)].masked_fill(is_prompt, _NO_TOKEN)

    def _walk(self, words: Sequence[_Words], tails: torch.Tensor) -> torch.Tensor:
        """``[num_nodes]`` of all rows: whether the row's output ends in a path to this node."""
        edges, sizes = _side_by_side([w.edges for w in words], words)
        from_nodes, token_ids, to_nodes = to_device(edges, self._device).unbind(1)
        line_of = to_device(np.repeat(np.arange(len(words)), sizes), self._device)
        roots = np.zeros(sum(w.num_nodes for w in words), dtype=np.int64)
        roots[_first_nodes(words)] = 1
        begins = to_device(roots, self._device)
        live = begins
        for newest in tails.unbind(1):
            steps = (live[from_nodes] > 0) & (newest[line_of] == token_ids)
            live = begins.index_add(0, to_nodes, steps.long())
        return live > 0


def _merge(words: Sequence[BadWord]) -> _Words:
    """One graph of all words: their beginnings are one node, their ends none."""
    edges, last_edges, num_nodes, depth = [], [], 1, 0
    for word in words:
        end = max(word.ends)
        inner = sorted({*word.starts, *word.ends} - {0, end})
        node_of = {0: _ROOT} | {place: num_nodes + i for i, place in enumerate(inner)}
        num_nodes += len(inner)
        longest = dict.fromkeys(node_of, 0)
        for start, token_id, stop in sorted(
            zip(word.starts, word.token_ids, word.ends, strict=True)
        ):
            if stop == end:
                last_edges.append((node_of[start], token_id))
                depth = max(depth, longest[start])
            else:
                edges.append((node_of[start], token_id, node_of[stop]))
                longest[stop] = max(longest[stop], longest[start] + 1)
    return _Words(_array(edges, 3), _array(last_edges, 2), num_nodes, depth)


def _array(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _first_nodes(words: Sequence[_Words]) -> list[int]:
    return list(accumulate((w.num_nodes for w in words[:-1]), initial=0))


def _side_by_side(edges: Sequence[Ints], words: Sequence[_Words]) -> tuple[Ints, list[int]]:
    """Edges of several rows, each row's nodes after those of the one before; and how many each."""
    joined = np.concatenate(edges)
    sizes = [len(each) for each in edges]
    shift = np.repeat(_first_nodes(words), sizes)
    joined[:, 0] += shift
    if joined.shape[1] == 3:
        joined[:, 2] += shift
    return joined, sizes
