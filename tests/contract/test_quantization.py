"""Every file in worker/quantization: what it keeps of a weight, and what kernels make of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from services.common.errors import ConfigError
from services.common.plugins import plugin_names
from services.worker.layers.linear_kernel import make_quantized_kernel
from services.worker.layers.native_linear import NativeLinear
from services.worker.layers.quantized_linear import QuantizedLinear
from services.worker.loader.load_model import quantization_method
from services.worker.native.isa import LEVELS, best_level, machine_flags
from services.worker.native.library import Library, load_library
from services.worker.quantization.base import GROUP_SIZE, QuantizationMethod

LEVELS_HERE = [isa.name for isa in LEVELS[: best_level(machine_flags()) + 1]]
DTYPES = [torch.bfloat16, torch.float32]
STEPS = {"int8": 2 * 127, "int4": 15}
"""From a group's least value to its largest."""


@pytest.fixture(params=plugin_names("services.worker.quantization"))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def method(name: str) -> QuantizationMethod:
    return quantization_method(name)


@pytest.fixture(params=LEVELS_HERE)
def library(request: pytest.FixtureRequest) -> Library:
    loaded = load_library(request.param, num_threads=2)
    assert loaded is not None
    return loaded


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_an_unknown_method_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown quantization 'int3'; available: int4, int8"):
        quantization_method("int3")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 1), (37, 45), (64, 96), (5000, 33)])
def test_no_weight_is_further_off_than_the_rounding_of_its_group(
    method: QuantizationMethod, name: str, out_size: int, in_size: int, dtype: torch.dtype
) -> None:
    # Rows of unlike size: a scale that is not the group's own shows.
    weight = (draw(out_size, in_size) * torch.logspace(-3, 1, out_size)[:, None]).to(dtype)
    kept = method.quantize(weight).dequantize(torch.float32)
    for start in range(0, in_size, GROUP_SIZE):
        group, kept_group = (part[:, start : start + GROUP_SIZE].float() for part in (weight, kept))
        width = group.amax(1) - group.amin(1) if name == "int4" else 2 * group.abs().amax(1)
        # float16 scales are off by 2^-11 of themselves or, the least of them, by 2^-25.
        largest = group.abs().amax(1)
        step = width / STEPS[name]
        rounding = largest * 2.0**-10 + STEPS[name] * 2.0**-25
        off = (kept_group - group).abs()
        if name == "int8":
            assert (off <= (step / 2 + rounding)[:, None]).all()
            continue
        assert (off <= (step + rounding)[:, None]).all()
        if group.shape[1] == GROUP_SIZE:  # fitted as a whole, at the cost of its extremes
            lost = end_to_end(group[:, None])[:, 0].sub(group).norm(dim=1)
            assert (off.norm(dim=1) <= lost + rounding * GROUP_SIZE**0.5).all()


def end_to_end(groups: torch.Tensor) -> torch.Tensor:
    """Groups ``[..., GROUP_SIZE]`` in 16 values from the least weight to the largest."""
    least = groups.amin(-1, keepdim=True)
    step = ((groups.amax(-1, keepdim=True) - least) / STEPS["int4"]).clamp_min(1e-30)
    return ((groups - least) / step).round() * step + least


def test_4_bits_lose_an_eighth_less_than_from_end_to_end() -> None:
    weight = draw(64, 1024)
    kept = quantization_method("int4").quantize(weight).dequantize(torch.float32)
    plain = end_to_end(weight.unflatten(1, (-1, GROUP_SIZE))).flatten(1)
    assert (kept - weight).square().mean() < 7 / 8 * (plain - weight).square().mean()


def test_zeros_stay_and_a_constant_group_is_off_by_a_rounded_scale_only(
    method: QuantizationMethod,
) -> None:
    weight = torch.zeros(3, 64)
    weight[0] = 0.3
    weight[1, 32:] = -1.0
    kept = method.quantize(weight).dequantize(torch.float32)
    assert ((kept - weight).abs() <= weight.abs() * 2.0**-11).all()


def test_4_bits_keep_what_4_bits_made() -> None:
    method = quantization_method("int4")
    once = method.quantize(draw(40, 96)).dequantize(torch.float32)
    twice = method.quantize(once).dequantize(torch.float32)
    torch.testing.assert_close(twice, once, atol=2e-3, rtol=0)
    # Also where the weights were rounded since: the same 16 values, not others nearby.
    values = method.quantize(once.to(torch.bfloat16)).values
    assert torch.equal(values, method.quantize(once).values)


def test_parts_below_one_another_are_the_whole(method: QuantizationMethod) -> None:
    weight = draw(30, 45)
    parts = method.quantize(weight[:11]).above(method.quantize(weight[11:]))
    whole = method.quantize(weight)
    assert parts.shape == whole.shape == (30, 45)
    assert torch.equal(parts.dequantize(torch.float32), whole.dequantize(torch.float32))
    ids = torch.tensor([29, 0, 11])
    expected = whole.dequantize(torch.float32)[ids]
    assert torch.equal(whole.rows(ids).dequantize(torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 1), (37, 45), (70, 1536), (576, 64)])
def test_native_products_are_those_of_the_reference(
    library: Library,
    method: QuantizationMethod,
    out_size: int,
    in_size: int,
    dtype: torch.dtype,
) -> None:
    weight = method.quantize(draw(out_size, in_size))
    bias = draw(out_size, dtype=dtype, seed=1)
    x = draw(300, in_size, dtype=dtype, seed=2)
    native = NativeLinear.pack_quantized(weight, bias, dtype=dtype, library=library)
    exact = functional.linear(x.double(), weight.dequantize(torch.float32).double(), bias.double())
    # Each result is rounded once, and for more than eight rows each weight: a random walk.
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    tolerance = exact.abs() * rounding + 8 * rounding * in_size**0.5 + in_size * 2.0**-20
    for num_rows in (*range(1, 10), 16, 17, 33, 70, 300):
        error = (native(x[:num_rows]).double() - exact[:num_rows]).abs()
        assert (error <= tolerance[:num_rows]).all(), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_more_than_a_tile_takes_are_multiplied_tile_by_tile(
    library: Library, method: QuantizationMethod, dtype: torch.dtype
) -> None:
    native = NativeLinear.pack_quantized(
        method.quantize(draw(40, 64)), None, dtype=dtype, library=library
    )
    x = draw(1100, 64, dtype=dtype, seed=2)
    assert torch.equal(native(x), torch.cat([native(x[:600]), native(x[600:])]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_others_only_by_whether_they_are_more_than_eight(
    library: Library, method: QuantizationMethod, dtype: torch.dtype
) -> None:
    weight = method.quantize(draw(96, 160))
    native = NativeLinear.pack_quantized(weight, None, dtype=dtype, library=library)
    x = draw(70, 160, dtype=dtype, seed=2)
    for num_rows in range(1, 8):
        assert torch.equal(native(x[:num_rows]), native(x[:8])[:num_rows])
    for num_rows in (9, 16, 17, 33, 64):
        assert torch.equal(native(x[:num_rows]), native(x)[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_or_an_infinity_ends_in_its_row_and_nowhere_else(
    library: Library, method: QuantizationMethod, dtype: torch.dtype
) -> None:
    native = NativeLinear.pack_quantized(
        method.quantize(draw(48, 96)), None, dtype=dtype, library=library
    )
    for num_rows in (1, 8, 20):
        x = draw(num_rows, 96, dtype=dtype, seed=2)
        for value in (torch.nan, torch.inf, -torch.inf):
            x[num_rows // 2, 40] = value
            is_finite = native(x).isfinite()
            assert not is_finite[num_rows // 2].any()
            assert is_finite.sum() == 48 * (num_rows - 1)


@pytest.mark.parametrize("factor", [1e-37, 1e-30, 1e-5, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_size_and_with_outliers_lose_at_most_a_16_bit_step_of_their_group(
    library: Library, method: QuantizationMethod, dtype: torch.dtype, factor: float
) -> None:
    weight = method.quantize(draw(48, 96))
    native = NativeLinear.pack_quantized(weight, None, dtype=dtype, library=library)
    x = draw(5, 96, dtype=torch.float32, seed=2)
    x[:, ::GROUP_SIZE] *= 1000
    x = (x * factor).to(dtype)
    exact = functional.linear(x.double(), weight.dequantize(torch.float32).double())
    largest = x.double().abs().max()
    lost = GROUP_SIZE**0.5 * 8 * 2.0**-15 * largest + 1e-33
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    assert ((native(x).double() - exact).abs() <= lost + rounding * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_native", [True, False])
def test_gates_and_lookups_are_those_of_the_widened_weight(
    method: QuantizationMethod, is_native: bool, dtype: torch.dtype
) -> None:
    library = load_library() if is_native else None
    weight = method.quantize(draw(74, 45))
    widened = weight.dequantize(dtype)
    x = draw(9, 45, dtype=dtype, seed=2)
    kernel = make_quantized_kernel(weight, None, dtype=dtype, library=library)
    assert kernel.name == (NativeLinear.name if is_native else QuantizedLinear.name)
    assert kernel.lookup is not None
    ids = torch.tensor([73, 0, 20, 20])
    assert torch.equal(kernel.lookup(ids), widened[ids])
    gated = make_quantized_kernel(weight, None, dtype=dtype, library=library, is_gated=True)
    gate, up = functional.linear(x.double(), widened.double()).chunk(2, dim=-1)
    # The torch path rounds gate, silu and product to bfloat16, each about 10.
    tolerance = 1.0 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(
        gated(x).double(), functional.silu(gate) * up, atol=tolerance, rtol=2.0**-6
    )
