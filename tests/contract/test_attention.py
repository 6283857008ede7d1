"""Every file in worker/attention does what the seam says, measured against dense attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from services.common.errors import ConfigError
from services.common.plugins import load_plugin, plugin_names
from services.worker.attention._auto import resolve_backend
from services.worker.attention.base import AttentionBackend, AttentionBatch, AttentionSpec
from services.worker.kv_cache.allocation import allocate
from services.worker.kv_cache.spec import KvCacheSpec
from services.worker.native.isa import LEVELS, IsaSetting, best_level, machine_flags
from services.worker.native.library import load_library

PACKAGE = "services.worker.attention"
CPU = torch.device("cpu")
LEVELS_HERE = [isa.name for isa in LEVELS[: best_level(machine_flags()) + 1]]

# (query length, context length with it) of each request.
MIXES: dict[str, list[tuple[int, int]]] = {
    "one decode": [(1, 37)],
    "decodes of unlike length": [(1, 1), (1, 300), (1, 16), (1, 17), (1, 65)],
    "many decodes": [(1, 1 + 29 * i) for i in range(19)],
    "many short queries": [(2, 2 + 37 * i) for i in range(17)],
    "one whole prompt": [(33, 33)],
    "prompts of unlike length": [(5, 5), (70, 70), (1, 1), (16, 16)],
    "chunk with context": [(9, 50)],
    "chunks and decodes": [(1, 20), (30, 30), (1, 129), (7, 60), (2, 2), (1, 64)],
}


@dataclass
class Case:
    """A batch over scattered blocks, its tensors, and what dense attention makes of it."""

    spec: AttentionSpec
    mix: Sequence[tuple[int, int]]
    blocks: list[list[int]]
    kv_cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def slot(self, row: int, position: int) -> int:
        size = self.spec.block_size
        return self.blocks[row][position // size] * size + position % size

    @property
    def new_slots(self) -> list[int]:
        return [
            self.slot(row, position)
            for row, (query_len, seq_len) in enumerate(self.mix)
            for position in range(seq_len - query_len, seq_len)
        ]

    def batch(self, *, num_padding: int = 0) -> AttentionBatch:
        starts = [0]
        for query_len, _ in self.mix:
            starts.append(starts[-1] + query_len)
        seq_lens = [seq_len for _, seq_len in self.mix]
        width = max(len(blocks) for blocks in self.blocks) + 1
        table = [blocks + [0] * (width - len(blocks)) for blocks in self.blocks]
        return AttentionBatch(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(table, dtype=torch.int32),
            slot_mapping=torch.tensor(self.new_slots + [-1] * num_padding),
            query_start_loc_cpu=starts,
            seq_lens_cpu=seq_lens,
        )

    def attend(
        self, backend: AttentionBackend, *, window: int | None, scale: float = 0.25
    ) -> torch.Tensor:
        return backend.begin_step(self.batch()).attend(
            self.query,
            self.key,
            self.value,
            kv_cache=self.kv_cache,
            scale=scale,
            sliding_window=window,
        )

    def expected(self, *, window: int | None, scale: float = 0.25) -> torch.Tensor:
        """Dense attention in float64, a request at a time."""
        rows = []
        start = 0
        for row, (query_len, seq_len) in enumerate(self.mix):
            query = self.query[start : start + query_len].double()
            rows.append(dense(query, self.keys[row], self.values[row], window=window, scale=scale))
            assert seq_len == len(self.keys[row])
            start += query_len
        return torch.cat(rows)


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(group, dim=1)
    value = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    num_queries, num_keys = scores.shape[1:]
    ages = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
    hidden = (ages < 0) if window is None else (ages < 0) | (ages >= window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def make_case(
    mix: Sequence[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    isa: IsaSetting = "auto",
) -> Case:
    """Contexts in scattered blocks; the new tokens' keys and values are not in the cache yet."""
    spec = AttentionSpec(
        num_heads, num_kv_heads, head_size, block_size, dtype, CPU, load_library(isa)
    )
    num_blocks = [-(-seq_len // block_size) for _, seq_len in mix]
    free = list(range(1, sum(num_blocks) + 4))
    random.Random(seed).shuffle(free)
    blocks = [[free.pop() for _ in range(num)] for num in num_blocks]
    kv_spec = KvCacheSpec(1, num_kv_heads, head_size, block_size, dtype)
    (kv_cache,) = allocate(kv_spec, sum(num_blocks) + 4, device=CPU)
    generator = torch.Generator().manual_seed(seed)

    def draw(num_tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, head_size, generator=generator).to(dtype)

    keys = [draw(seq_len, num_kv_heads) for _, seq_len in mix]
    values = [draw(seq_len, num_kv_heads) for _, seq_len in mix]
    lens = [(seq_len - query_len, seq_len) for query_len, seq_len in mix]
    case = Case(
        spec=spec,
        mix=mix,
        blocks=blocks,
        kv_cache=kv_cache,
        query=draw(sum(query_len for query_len, _ in mix), num_heads),
        key=torch.cat([key[old:] for key, (old, _) in zip(keys, lens, strict=True)]),
        value=torch.cat([value[old:] for value, (old, _) in zip(values, lens, strict=True)]),
        keys=keys,
        values=values,
    )
    for row, (old, _) in enumerate(lens):
        for position in range(old):
            write(case, row, position)
    return case


def write(case: Case, row: int, position: int) -> None:
    block_id, offset = divmod(case.slot(row, position), case.spec.block_size)
    case.kv_cache[0, block_id, offset] = case.keys[row][position]
    case.kv_cache[1, block_id, offset] = case.values[row][position]


def build(name: str, case: Case) -> AttentionBackend:
    backend: AttentionBackend = load_plugin(PACKAGE, name, what="attention backend").build(
        case.spec
    )
    return backend


def assert_attends(
    backend_name: str, case: Case, *, window: int | None = None, scale: float = 0.25
) -> None:
    actual = case.attend(build(backend_name, case), window=window, scale=scale)
    assert actual.shape == case.query.shape
    assert actual.is_contiguous()
    # bfloat16 rounds the result (2**-8 of values up to about 3) and the weights in front of it.
    atol = 2e-5 if case.spec.dtype == torch.float32 else 3e-2
    expected = case.expected(window=window, scale=scale)
    torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=0)


@pytest.fixture(params=plugin_names(PACKAGE))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 40, 1000])
@pytest.mark.parametrize("mix", MIXES)
def test_any_batch_and_window(name: str, mix: str, window: int | None, dtype: torch.dtype) -> None:
    assert_attends(name, make_case(MIXES[mix], dtype=dtype), window=window)


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("block_size", [1, 4, 32, 128])
def test_any_block_size(name: str, block_size: int, window: int | None) -> None:
    case = make_case(MIXES["chunks and decodes"], block_size=block_size)
    assert_attends(name, case, window=window)


@pytest.mark.parametrize("head_size", [8, 64, 80, 128, 256])
def test_any_head_size(name: str, head_size: int) -> None:
    case = make_case(MIXES["chunks and decodes"], head_size=head_size)
    assert_attends(name, case, scale=head_size**-0.5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (9, 3), (8, 1), (1, 1)])
@pytest.mark.parametrize("mix", ["decodes of unlike length", "chunks and decodes"])
def test_any_number_of_queries_per_kv_head(
    name: str, mix: str, num_heads: int, num_kv_heads: int
) -> None:
    assert_attends(name, make_case(MIXES[mix], num_heads=num_heads, num_kv_heads=num_kv_heads))


def test_random_batches(name: str) -> None:
    rng = random.Random(1)
    for seed in range(25):
        mix = []
        for _ in range(rng.randint(1, 12)):
            query_len = rng.choice((1, 1, 1, rng.randint(1, 40)))
            mix.append((query_len, query_len + rng.choice((0, rng.randint(0, 90)))))
        case = make_case(mix, seed=seed, block_size=rng.choice((2, 16)))
        assert_attends(name, case, window=rng.choice((None, rng.randint(1, 50))))


def test_writes_the_new_keys_and_values_and_nothing_else(name: str) -> None:
    case = make_case(MIXES["chunks and decodes"])
    before = case.kv_cache.clone()
    case.attend(build(name, case), window=None)
    for row, (query_len, seq_len) in enumerate(case.mix):
        for position in range(seq_len - query_len, seq_len):
            block_id, offset = divmod(case.slot(row, position), case.spec.block_size)
            assert torch.equal(case.kv_cache[0, block_id, offset], case.keys[row][position])
            assert torch.equal(case.kv_cache[1, block_id, offset], case.values[row][position])
            before[:, block_id, offset] = case.kv_cache[:, block_id, offset]
    assert torch.equal(case.kv_cache, before)


def test_writes_from_views_of_a_fused_projection(name: str) -> None:
    case = make_case(MIXES["chunks and decodes"])
    fused = torch.cat((case.query, case.key, case.value), dim=1)
    case.query, case.key, case.value = fused.split((4, 2, 2), dim=1)
    assert_attends(name, case)


def test_a_request_reads_blocks_that_another_fills_in_the_same_step(name: str) -> None:
    """Two requests share a prompt's block: one computes it now, the other counts on it."""
    case = make_case([(16, 16), (3, 19)], block_size=16)
    case.blocks[1][0] = case.blocks[0][0]
    case.keys[1][:16] = case.keys[0]
    case.values[1][:16] = case.values[0]
    assert_attends(name, case)


def test_stale_nan_in_reused_blocks_never_leaks(name: str) -> None:
    for window in (None, 5):
        case = make_case(MIXES["chunks and decodes"])
        valid = {case.slot(row, at) for row, (_, end) in enumerate(case.mix) for at in range(end)}
        slots = case.kv_cache.flatten(1, 2)
        for slot in range(case.spec.block_size, slots.shape[1]):
            if slot not in valid:
                slots[:, slot] = torch.nan
        assert_attends(name, case, window=window)


def test_padding_tokens_write_nothing_and_disturb_nothing(name: str) -> None:
    case = make_case(MIXES["chunks and decodes"])
    before = case.kv_cache.clone()
    padding = torch.full((3, 4, 16), torch.nan)
    actual = (
        build(name, case)
        .begin_step(case.batch(num_padding=3))
        .attend(
            torch.cat((case.query, padding)),
            torch.cat((case.key, padding[:, :2])),
            torch.cat((case.value, padding[:, :2])),
            kv_cache=case.kv_cache,
            scale=0.25,
            sliding_window=None,
        )
    )
    expected = case.expected(window=None)
    torch.testing.assert_close(actual[:-3].double(), expected, atol=2e-5, rtol=0)
    new = torch.tensor(case.new_slots)
    before.flatten(1, 2)[:, new] = case.kv_cache.flatten(1, 2)[:, new]
    assert torch.equal(case.kv_cache, before)


def test_layers_with_unlike_windows_share_a_step(name: str) -> None:
    case = make_case(MIXES["chunks and decodes"])
    step = build(name, case).begin_step(case.batch())
    for window in (None, 7, None, 30, 7):
        actual = step.attend(
            case.query,
            case.key,
            case.value,
            kv_cache=case.kv_cache,
            scale=0.25,
            sliding_window=window,
        )
        expected = case.expected(window=window)
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", LEVELS_HERE)
class TestNativeLevels:
    """The native backend at each instruction set level that this machine has."""

    @pytest.mark.parametrize("head_size", [8, 16, 32, 48, 64, 80, 112, 128, 192, 256])
    def test_any_head_size(self, isa: IsaSetting, dtype: torch.dtype, head_size: int) -> None:
        for block_size, window in ((16, None), (5, 33)):
            case = make_case(
                MIXES["chunks and decodes"],
                head_size=head_size,
                block_size=block_size,
                dtype=dtype,
                isa=isa,
            )
            assert_attends("native_cpu", case, window=window, scale=head_size**-0.5)

    @pytest.mark.parametrize("window", [None, 100, 700])
    @pytest.mark.parametrize("block_size", [16, 24, 128])
    def test_long_contexts_in_parts_over_threads(
        self, isa: IsaSetting, dtype: torch.dtype, block_size: int, window: int | None
    ) -> None:
        mix = [(1, 1700), (130, 1100), (1, 512), (3, 515), (2, 1025), (40, 600), (1, 513)]
        case = make_case(
            mix, num_heads=6, num_kv_heads=2, block_size=block_size, dtype=dtype, isa=isa
        )
        assert_attends("native_cpu", case, window=window)

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 1), (7, 7)])
    def test_any_group_and_scores_of_any_size(
        self, isa: IsaSetting, dtype: torch.dtype, num_heads: int, num_kv_heads: int
    ) -> None:
        case = make_case(
            MIXES["chunks and decodes"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=32,
            dtype=dtype,
            isa=isa,
        )
        for scale in (1e-3, 0.2, 4.0):
            assert_attends("native_cpu", case, scale=scale)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("isa", LEVELS_HERE)
def test_float32_natively_is_bitwise_the_same_alone_in_a_mix_and_in_chunks(
    isa: IsaSetting, window: int | None
) -> None:
    """What a token gives depends on its own sequence only."""
    whole = make_case([(700, 700)], num_heads=6, isa=isa)
    expected = whole.attend(build("native_cpu", whole), window=window)
    mix = [(1, 40), (1, 700), (57, 80), (5, 699), (33, 690)]
    mixed = make_case(mix, num_heads=6, isa=isa, seed=1)
    slots = mixed.kv_cache.flatten(1, 2)
    start = 0
    for row, (query_len, seq_len) in enumerate(mix):
        if seq_len > 600:  # these are parts of the one whole prompt
            tokens = slice(seq_len - query_len, seq_len)
            mixed.query[start : start + query_len] = whole.query[tokens]
            mixed.key[start : start + query_len] = whole.key[tokens]
            mixed.value[start : start + query_len] = whole.value[tokens]
            for position in range(seq_len - query_len):
                slots[0, mixed.slot(row, position)] = whole.keys[0][position]
                slots[1, mixed.slot(row, position)] = whole.values[0][position]
        start += query_len
    actual = mixed.attend(build("native_cpu", mixed), window=window)
    start = 0
    for query_len, seq_len in mix:
        if seq_len > 600:
            assert torch.equal(
                actual[start : start + query_len], expected[seq_len - query_len : seq_len]
            )
        start += query_len


def test_auto_is_native_where_it_can_be() -> None:
    spec = make_case(MIXES["one decode"]).spec
    assert resolve_backend("auto", spec) == "native_cpu"
    assert resolve_backend("torch_sdpa", spec) == "torch_sdpa"
    assert resolve_backend("auto", replace(spec, library=None)) == "torch_sdpa"
    assert resolve_backend("auto", replace(spec, dtype=torch.float16)) == "torch_sdpa"


def test_native_attention_without_the_library_is_refused() -> None:
    spec = replace(make_case(MIXES["one decode"]).spec, library=None)
    with pytest.raises(ConfigError, match="no native library"):
        load_plugin(PACKAGE, "native_cpu", what="attention backend").build(spec)


def test_query_heads_that_kv_heads_do_not_divide_are_refused(name: str) -> None:
    spec = AttentionSpec(5, 2, 16, 16, torch.float32, CPU)
    with pytest.raises(ConfigError, match=f"{name}.*5 query heads.*2 KV heads"):
        load_plugin(PACKAGE, name, what="attention backend").build(spec)


def test_an_unknown_backend_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"'nope'.*available: .*torch_sdpa"):
        load_plugin(PACKAGE, "nope", what="attention backend")
