"""Samples one token a row: the transforms in the reference order, then argmax or a draw.

Order (as vLLM's Model Runner V2): grammar mask, allowed ids, bias, min_tokens, penalties, bad
words, temperature, min_p, top_k, top_p, draw. Knows rows and token ids, neither requests nor the
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.common.errors import InvalidRequest, RequestFailed, SluicewayError
from services.common.sampling import SamplingParams
from services.worker.native.library import Library
from services.worker.sampling.allowed_token_ids import AllowedTokenIds
from services.worker.sampling.bad_words import BadWords
from services.worker.sampling.base import LogitRows, LogitsTransform, to_device
from services.worker.sampling.draw_keys import draw_keys
from services.worker.sampling.grammar_mask import GrammarMask, apply_grammar_mask
from services.worker.sampling.greedy import Greedy
from services.worker.sampling.gumbel import GumbelDraw
from services.worker.sampling.logit_bias import LogitBias
from services.worker.sampling.min_p import MinP
from services.worker.sampling.min_tokens import MinTokens
from services.worker.sampling.penalties import Penalties
from services.worker.sampling.row_ops import argmax
from services.worker.sampling.temperature import Temperature
from services.worker.sampling.top_k import TopK
from services.worker.sampling.top_p import TopP

_CHUNK_BYTES = 2 << 20
"""Logits that are transformed at a time: they stay in the cache from one transform to the next."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row, still on the device.

    Attributes:
        token_ids: ``[n]`` int64.
        scores: ``[n]`` float32: each token's logit after all transforms. Not finite = the row
            failed: minus infinity if everything was banned, NaN or infinity if the model gave that.
    """

    token_ids: torch.Tensor
    scores: torch.Tensor


class Sampler:
    """Holds the sampling parameters of every row."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        library: Library | None = None,
    ) -> None:
        """
        Args:
            max_num_seqs: Rows.
            vocab_size: Width of the logits.
            eos_token_ids: All end-of-sequence ids of the model.
            device: Where the logits are.
            library: Native CPU kernels; ``None`` = torch computes all.
        """
        self._device = device
        self._greedy = Greedy(library)
        self._chunk_lines = max(1, _CHUNK_BYTES // (4 * vocab_size))
        self._draw = GumbelDraw(vocab_size=vocab_size, device=device)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self._choices = np.zeros(max_num_seqs, dtype=np.int64)
        self._is_random = np.zeros(max_num_seqs, dtype=bool)
        self._is_plain = np.ones(max_num_seqs, dtype=bool)
        self._transforms: tuple[LogitsTransform, ...] = (
            AllowedTokenIds(device),
            LogitBias(device),
            MinTokens(max_num_seqs=max_num_seqs, eos_token_ids=eos_token_ids, device=device),
            Penalties(max_num_seqs=max_num_seqs, device=device),
            BadWords(device),
            Temperature(max_num_seqs=max_num_seqs, device=device),
            MinP(max_num_seqs=max_num_seqs, device=device),
            TopK(max_num_seqs=max_num_seqs, vocab_size=vocab_size),
            TopP(max_num_seqs=max_num_seqs, device=device),
        )

    def add(self, row: int, params: SamplingParams, *, choice: int) -> None:
        """Take a request's parameters for its row.

        Args:
            row: Its row.
            params: Valid for this vocabulary.
            choice: Index of the choice in its request, part of the key of its draws.
        """
        # No seed: the runner's own profile, a prompt to pool, or a client that is no gateway.
        self._seeds[row] = params.seed or 0
        self._choices[row] = choice
        self._is_random[row] = not params.is_greedy
        needs = [transform.add(row, params) for transform in self._transforms]
        self._is_plain[row] = params.is_greedy and not any(needs)

    def remove(self, row: int) -> None:
        """Forget a row."""
        for transform in self._transforms:
            transform.remove(row)

    def sample(
        self, logits: torch.Tensor, rows: LogitRows, *, grammar: GrammarMask | None = None
    ) -> Sampled:
        """Choose the next token of each row.

        Args:
            logits: ``[n, vocab_size]`` in the model's dtype; only ``grammar`` changes them.
            rows: Whose they are.
            grammar: What the grammars allow, if any row has one.
        """
        if grammar is not None:
            apply_grammar_mask(logits, lines=grammar.lines, bitmask=grammar.bitmask)
        is_plain = self._is_plain[rows.rows]
        if grammar is not None:
            # min_tokens and bans yield where nothing but the end is left.
            is_plain[grammar.ending_lines] = True
        if is_plain.all():
            return self._sample_plain(logits, rows)
        if not is_plain.any():
            return self._sample_transformed(logits, rows)
        num_lines = len(is_plain)
        token_ids = torch.empty(num_lines, dtype=torch.int64, device=self._device)
        scores = torch.empty(num_lines, dtype=torch.float32, device=self._device)
        for index, sample in (
            (np.flatnonzero(is_plain), self._sample_plain),
            (np.flatnonzero(~is_plain), self._sample_transformed),
        ):
            lines = to_device(index, self._device)
            part = sample(logits[lines], rows.take(index))
            token_ids[lines], scores[lines] = part.token_ids, part.scores
        return Sampled(token_ids, scores)

    def transformed(self, logits: torch.Tensor, rows: LogitRows) -> torch.Tensor:
        """The logits that tokens are chosen by.

        Args:
            logits: ``[n, vocab_size]``; not changed.
            rows: Whose they are.

        Returns:
            ``[n, vocab_size]`` float32 after all transforms; banned tokens have minus infinity.
        """
        work = logits.to(torch.float32, copy=True)
        for transform in self._transforms:
            transform.apply(work, rows)
        return work

    def _sample_plain(self, logits: torch.Tensor, _rows: LogitRows) -> Sampled:
        """Greedy without transforms: no copy of the logits."""
        return Sampled(*self._greedy(logits))

    def _sample_transformed(self, logits: torch.Tensor, rows: LogitRows) -> Sampled:
        starts = range(0, logits.shape[0], self._chunk_lines)
        chunks = [slice(start, start + self._chunk_lines) for start in starts]
        done = [self._sample_chunk(logits[chunk], rows.take(chunk)) for chunk in chunks]
        return Sampled(
            torch.cat([sampled.token_ids for sampled in done]),
            torch.cat([sampled.scores for sampled in done]),
        )

    def _sample_chunk(self, logits: torch.Tensor, rows: LogitRows) -> Sampled:
        work = self.transformed(logits, rows)
        # False for infinity and for NaN, which wins amax: a ban must not hide them.
        is_sound = logits.amax(dim=-1) < torch.inf
        token_ids = self._choose(work, rows)
        scores = work.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        return Sampled(token_ids, torch.where(is_sound, scores, torch.nan))

    def _choose(self, logits: torch.Tensor, rows: LogitRows) -> torch.Tensor:
        is_random = self._is_random[rows.rows]
        if not is_random.any():
            return argmax(logits)
        keys = draw_keys(
            self._seeds[rows.rows], choices=self._choices[rows.rows], positions=rows.num_known
        )
        if is_random.all():
            return self._draw.draw(logits, keys)
        chosen = argmax(logits)
        lines = to_device(np.flatnonzero(is_random), self._device)
        chosen[lines] = self._draw.draw(logits[lines], keys[is_random])
        return chosen


def failure_of(score: float) -> SluicewayError:
    """Why a row with this score failed.

    Args:
        score: Not finite.
    """
    if score == -np.inf:
        return InvalidRequest(
            "no token is left to choose from: allowed_token_ids, bad_words, logit_bias, the tokens "
            "that min_tokens holds back and the constraint ban every one; loosen one of them"
        )
    return RequestFailed(
        f"a logit is {score}: by the model, or by penalties or a bias out of bounds"
    )
