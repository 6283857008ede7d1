"""A device that runs plans in order and checks that every row reads the KV of its own prefix.

The KV of a token is a hash of the whole sequence up to it, so a block that is shared wrongly,
evicted under a reader or overwritten shows at once. Tokens are drawn from (seed, choice, position,
prefix), so what a request must get is known without running it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.errors import RequestFailed, SluicewayError
from services.common.sampling import SamplingParams
from services.scheduler.core.output import NewRow, StepOutcome, StepPlan

_MASK = (1 << 61) - 1
WRONG_KV = -1


def extend(prefix: int, token_id: int) -> int:
    """Hash of a sequence that is one token longer."""
    return (prefix * 1_000_003 + token_id + 1) & _MASK


def draw(seed: int | None, *, choice: int, position: int, prefix: int, vocab_size: int) -> int:
    """The token at ``position`` of a sequence whose earlier tokens hash to ``prefix``.

    Without a seed as with 0, as the worker does it.
    """
    mixed = (prefix ^ ((seed or 0) * 7_919 + choice * 104_729 + position * 1_299_709)) & _MASK
    return (mixed * 2_654_435_761 >> 20) % vocab_size


def expected_output(
    prompt_ids: Sequence[int],
    *,
    sampling: SamplingParams,
    choice: int,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    vocab_size: int,
) -> list[int]:
    """What a request gets when it runs alone on a device that is never short of anything."""
    prefix = 0
    for token_id in prompt_ids:
        prefix = extend(prefix, token_id)
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    output: list[int] = []
    while len(output) < max_tokens:
        token_id = draw(
            sampling.seed,
            choice=choice,
            position=len(prompt_ids) + len(output),
            prefix=prefix,
            vocab_size=vocab_size,
        )
        output.append(token_id)
        prefix = extend(prefix, token_id)
        if token_id in ends and len(output) >= sampling.min_tokens:
            break
    return output


def vector_of(token_ids: Sequence[int]) -> bytes:
    """What pooling gives: it depends on every token that was computed."""
    return repr(list(token_ids)).encode()


@dataclass(slots=True)
class _Row:
    choice: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    has_ended: bool = False
    pools: bool = False
    seen: list[int] = field(default_factory=list)  # tokens computed here, not found in the cache
    prefixes: list[int] = field(default_factory=list)  # prefixes[i] covers token_ids[: i + 1]

    def prefix_at(self, position: int) -> int:
        while len(self.prefixes) <= position:
            before = self.prefixes[-1] if self.prefixes else 0
            self.prefixes.append(extend(before, self.token_ids[len(self.prefixes)]))
        return self.prefixes[position]


class Device:
    """Runs one plan at a time, in the order of a worker: ended, preempted, new, diffs, run.

    Attributes:
        rows: By handle.
        bad_handles: Rows that write wrong KV and fail when they sample.
        fatal_handles: Rows that make the whole step fail.
        num_tokens_run: All tokens computed.
        knows_pooling: Whether rows that pool give their vectors.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.rows: dict[int, _Row] = {}
        self.bad_handles: set[int] = set()
        self.fatal_handles: set[int] = set()
        self.num_tokens_run = 0
        self.num_failed_steps = 0
        self.knows_pooling = True
        self.batch_sizes: list[int] = []
        self._kv: list[int | None] = [None] * (num_blocks * block_size)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._eos_token_ids = set(eos_token_ids)

    def run(self, plan: StepPlan, *, device_s: float = 0.0) -> StepOutcome:
        """Run a step; what it reads is checked."""
        self._update_rows(plan)
        self.batch_sizes.append(len(plan.handles))
        self.num_tokens_run += plan.total_num_tokens
        assert sum(plan.num_tokens) == plan.total_num_tokens
        live = [
            (handle, num_tokens)
            for handle, num_tokens in zip(plan.handles, plan.num_tokens, strict=True)
            if handle in self.rows and not self.rows[handle].has_ended
        ]
        if any(handle in self.fatal_handles for handle, _ in live):
            self.num_failed_steps += 1
            self._spoil(live)
            return StepOutcome(step=plan.step, failed="boom")
        for handle, num_tokens in live:  # every layer writes all its KV before it reads any
            self._write(handle, num_tokens)
        sampled: dict[int, int] = {}
        row_errors: dict[int, SluicewayError] = {}
        for handle, num_tokens in live:
            self._run_row(handle, num_tokens, sampled, row_errors)
        pooled = self._vectors([handle for handle, _ in live if handle not in row_errors])
        return StepOutcome(
            step=plan.step,
            handles=list(plan.handles),
            num_sampled=[int(handle in sampled) for handle in plan.handles],
            token_ids=[sampled[handle] for handle in plan.handles if handle in sampled],
            row_errors=row_errors,
            pooled=pooled,
            device_s=device_s,
        )

    def _update_rows(self, plan: StepPlan) -> None:
        for handle in (*plan.finished, *plan.preempted):
            self.rows.pop(handle, None)
        for new in plan.new_rows:
            assert new.handle not in self.rows, "a row is sent whole only once"
            assert new.handle in plan.handles
            self.rows[new.handle] = self._new_row(new)
        start = 0
        for handle, count in zip(plan.handles, plan.num_new_blocks, strict=True):
            self.rows[handle].block_ids += plan.new_block_ids[start : start + count]
            start += count
        assert start == len(plan.new_block_ids)

    def _new_row(self, new: NewRow) -> _Row:
        return _Row(
            choice=new.choice,
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=list(new.block_ids),
            sampling=new.sampling,
            pools=new.pools,
        )

    def _slot(self, row: _Row, position: int) -> int:
        block_id = row.block_ids[position // self._block_size]
        assert block_id != 0, "the null block is never used"
        return block_id * self._block_size + position % self._block_size

    def _write(self, handle: int, num_tokens: int) -> None:
        row = self.rows[handle]
        for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
            kv = WRONG_KV if handle in self.bad_handles else row.prefix_at(position)
            self._kv[self._slot(row, position)] = kv

    def _spoil(self, live: Sequence[tuple[int, int]]) -> None:
        for handle, num_tokens in live:
            row = self.rows[handle]
            for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
                self._kv[self._slot(row, position)] = WRONG_KV
            row.has_ended = True  # nothing more comes of it until it is sent anew

    def _run_row(
        self,
        handle: int,
        num_tokens: int,
        sampled: dict[int, int],
        row_errors: dict[int, SluicewayError],
    ) -> None:
        row = self.rows[handle]
        row.seen += row.token_ids[row.num_computed_tokens :][:num_tokens]
        row.num_computed_tokens += num_tokens
        assert row.num_computed_tokens <= len(row.token_ids)
        context = [self._kv[self._slot(row, i)] for i in range(row.num_computed_tokens)]
        if WRONG_KV in context:
            # What NaN does: it shows in the logits, where there are any.
            if row.num_computed_tokens == len(row.token_ids):
                row_errors[handle] = RequestFailed("NaN in the logits")
                row.has_ended = True
            return
        expected = [row.prefix_at(i) for i in range(row.num_computed_tokens)]
        assert context == expected, f"row {handle} reads KV that is not of its prefix"
        if row.num_computed_tokens == len(row.token_ids) and not row.pools:
            sampled[handle] = self._sample(row)

    def _vectors(self, handles: Sequence[int]) -> dict[int, bytes]:
        """Of rows that pool and are computed."""
        rows = {handle: self.rows[handle] for handle in handles if self.knows_pooling}
        return {
            handle: vector_of(row.seen)
            for handle, row in rows.items()
            if row.pools and row.num_computed_tokens == len(row.token_ids)
        }

    def _sample(self, row: _Row) -> int:
        sampling, position = row.sampling, len(row.token_ids)
        token_id = draw(
            sampling.seed,
            choice=row.choice,
            position=position,
            prefix=row.prefix_at(position - 1),
            vocab_size=self._vocab_size,
        )
        row.token_ids.append(token_id)
        num_outputs = len(row.token_ids) - row.num_prompt_tokens
        if token_id in self._eos_token_ids and num_outputs >= sampling.min_tokens:
            row.has_ended = not sampling.ignore_eos
        return token_id
