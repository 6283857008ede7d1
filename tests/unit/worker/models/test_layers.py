"""The layers against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from services.worker.layers.activation import silu_and_mul
from services.worker.layers.embedding import Embedding, TiedHead
from services.worker.layers.linear import Linear
from services.worker.layers.linear_kernel import (
    PackedLinear,
    PlainLinear,
    linear_kernel_name,
    packing_is_exact,
    torch_linear_for,
)
from services.worker.layers.rms_norm import RmsNorm
from services.worker.layers.rotary import RotaryEmbedding, default_frequencies
from services.worker.native.library import load_library

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not packing_is_exact(), reason="this CPU's oneDNN has no bfloat16 linears"
)


@needs_packing
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 300])
def test_packed_linear_rounds_no_more_than_plain(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(200, 130, generator=generator).bfloat16()
    bias = torch.randn(200, generator=generator).bfloat16() if has_bias else None
    x = torch.randn(num_rows, 130, generator=generator).bfloat16()
    exact = functional.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    packed = (PackedLinear(weight, bias)(x).double() - exact).abs().max()
    plain = (PlainLinear(weight, bias)(x).double() - exact).abs().max()
    assert packed <= 1.5 * plain


def test_without_the_native_library_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert torch_linear_for(torch.float32, CPU) is PlainLinear
    expected = PackedLinear if packing_is_exact() else PlainLinear
    assert torch_linear_for(torch.bfloat16, CPU) is expected
    assert torch_linear_for(torch.bfloat16, torch.device("cuda")) is PlainLinear


def test_the_native_library_has_linears_for_the_cpu_only() -> None:
    library = load_library()
    assert library is not None
    for dtype in (torch.float32, torch.bfloat16):
        assert linear_kernel_name(dtype, CPU, library=library) == "native"
    assert linear_kernel_name(torch.float16, CPU, library=library) == "plain"
    assert linear_kernel_name(torch.bfloat16, torch.device("cuda"), library=library) == "plain"
    assert linear_kernel_name(torch.float32, CPU, library=None) == "plain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_linear_is_its_parts_side_by_side(dtype: torch.dtype) -> None:
    linear = Linear(16, {"a": 8, "b": 24}, bias=True, dtype=dtype, device=CPU)
    slots = dict(linear.weight_slots("x."))
    assert list(slots) == ["x.a.weight", "x.a.bias", "x.b.weight", "x.b.bias"]
    for slot in slots.values():
        slot.copy_(torch.randn(slot.shape))
    x = torch.randn(5, 16, dtype=dtype)
    parts = [
        functional.linear(x, slots[f"x.{name}.weight"], slots[f"x.{name}.bias"]) for name in "ab"
    ]
    expected = torch.cat(parts, dim=-1)
    linear.finish_loading(None)
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("is_native", [True, False])
def test_a_gated_linear_is_its_first_part_gating_its_second(is_native: bool) -> None:
    linear = Linear(
        16, {"gate": 24, "up": 24}, bias=True, dtype=torch.float32, device=CPU, is_gated=True
    )
    slots = dict(linear.weight_slots("x."))
    for slot in slots.values():
        slot.copy_(torch.randn(slot.shape))
    x = torch.randn(5, 16)
    gate, up = (
        functional.linear(x, slots[f"x.{name}.weight"], slots[f"x.{name}.bias"])
        for name in ("gate", "up")
    )
    linear.finish_loading(load_library() if is_native else None)
    torch.testing.assert_close(linear(x), functional.silu(gate) * up)


@pytest.mark.parametrize("is_native", [True, False])
def test_a_tied_head_and_its_embedding_share_a_table(is_native: bool) -> None:
    embedding = Embedding(50, 24, dtype=torch.float32, device=CPU)
    ((_, slot),) = embedding.weight_slots("e")
    table = torch.randn(50, 24)
    slot.copy_(table)
    head = TiedHead(embedding)
    head.finish_loading(load_library() if is_native else None)
    ids = torch.tensor([0, 49, 7, 7])
    assert torch.equal(embedding(ids), table[ids])
    torch.testing.assert_close(head(table[:3]), table[:3] @ table.T)


def test_rms_norm_adds_in_place_and_normalises_the_sum() -> None:
    norm = RmsNorm(6, eps=1e-5, dtype=torch.float32, device=CPU)
    ((_, weight),) = norm.weight_slots("n")
    weight.copy_(torch.randn(6))
    x, residual = torch.randn(3, 6), torch.randn(3, 6)
    total = x + residual
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(norm.add_and_norm(x, residual), expected)
    torch.testing.assert_close(residual, total)


def test_silu_and_mul_takes_gates_first() -> None:
    gate, up = torch.randn(4, 7), torch.randn(4, 7)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), dim=-1)), expected)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotation_turns_pairs_of_halves_and_leaves_the_rest(rotary_dim: int) -> None:
    heads = torch.randn(5, 3, 8)
    positions = torch.tensor([0, 1, 7, 100, 1000])
    frequencies = default_frequencies(100.0, rotary_dim, device=CPU)
    rotation = RotaryEmbedding(frequencies, dtype=torch.float32).at(positions)
    half = rotary_dim // 2
    pairs = torch.complex(heads[..., :half], heads[..., half:rotary_dim])
    angles = positions[:, None, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag, heads[..., rotary_dim:]), dim=-1)
    torch.testing.assert_close(rotation.apply(heads), expected, atol=1e-4, rtol=1e-4)
