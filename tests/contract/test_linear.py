"""The native library's products at every level that this machine has, against float64."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional

from services.worker.layers.native_linear import NativeLinear
from services.worker.native.isa import LEVELS, best_level, machine_flags
from services.worker.native.library import Library, load_library

LEVELS_HERE = [isa.name for isa in LEVELS[: best_level(machine_flags()) + 1]]
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(1, 1), (16, 32), (37, 45), (130, 96), (192, 70), (576, 1536), (2000, 64)]
"""Output and input sizes; odd, even, whole panels and steps, and parts of them."""
NUM_ROWS = [*range(1, 8), 15, 16, 17, 31, 32, 33, 47, 64, 70, 129, 256]


@pytest.fixture(params=LEVELS_HERE)
def library(request: pytest.FixtureRequest) -> Library:
    loaded = load_library(request.param, num_threads=2)
    assert loaded is not None
    assert loaded.isa == request.param
    return loaded


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(result: torch.Tensor, exact: torch.Tensor, *, terms: int) -> None:
    """One rounding of the result, and those of a float32 sum of ``terms`` products about 1."""
    rounding = 2.0**-8 if result.dtype == torch.bfloat16 else 2.0**-23
    tolerance = exact.abs() * rounding + terms * 2.0**-20
    excess = (result.double() - exact).abs() - tolerance
    assert excess.max() <= 0, f"beyond the tolerance by {excess.max():.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_products_are_those_of_float64(
    library: Library, out_size: int, in_size: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight = draw(out_size, in_size, dtype=dtype)
    bias = draw(out_size, dtype=dtype, seed=1) if has_bias else None
    linear = NativeLinear.pack(weight, bias, library=library)
    x = draw(256, in_size, dtype=dtype, seed=2)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for num_rows in NUM_ROWS:
        assert_close(linear(x[:num_rows]), exact[:num_rows], terms=in_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_more_than_a_cache_holds_are_multiplied_tile_by_tile(
    library: Library, dtype: torch.dtype
) -> None:
    weight, x = draw(40, 1536, dtype=dtype), draw(700, 1536, dtype=dtype, seed=2)
    linear = NativeLinear.pack(weight, None, library=library)
    assert_close(linear(x), functional.linear(x.double(), weight.double()), terms=1536)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("out_size", "in_size"), [(74, 45), (576, 576), (64, 1536)])
def test_a_row_does_not_depend_on_the_rows_around_it(
    library: Library, out_size: int, in_size: int, is_gated: bool, dtype: torch.dtype
) -> None:
    weight = draw(out_size, in_size, dtype=dtype)
    linear = NativeLinear.pack(weight, None, library=library, is_gated=is_gated)
    x = draw(300, in_size, dtype=dtype, seed=2)
    together = linear(x)
    for num_rows in NUM_ROWS:
        for first in (0, 11):
            rows = slice(first, first + num_rows)
            assert torch.equal(linear(x[rows]), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 37, 1536])
def test_a_gated_product_rounds_once(library: Library, size: int, dtype: torch.dtype) -> None:
    weight, bias = draw(2 * size, 96, dtype=dtype), draw(2 * size, dtype=dtype, seed=1)
    linear = NativeLinear.pack(weight, bias, library=library, is_gated=True)
    x = draw(70, 96, dtype=dtype, seed=2)
    gate, up = functional.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=-1)
    exact = functional.silu(gate) * up
    for num_rows in (1, 17, 70):
        # Errors of gate and up, each of 96 terms, are multiplied by the other, about 10.
        assert_close(linear(x[:num_rows]), exact[:num_rows], terms=96 * 20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart_and_nothing_between_them_is_read(
    library: Library, dtype: torch.dtype
) -> None:
    linear = NativeLinear.pack(draw(48, 40, dtype=dtype), None, library=library)
    wide = torch.full((9, 100), torch.nan, dtype=dtype)
    wide[:, :40] = draw(9, 40, dtype=dtype, seed=2)
    assert torch.equal(linear(wide[:, :40]), linear(wide[:, :40].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row(library: Library, dtype: torch.dtype) -> None:
    linear = NativeLinear.pack(draw(48, 64, dtype=dtype), None, library=library)
    x = draw(20, 64, dtype=dtype, seed=2)
    x[7, 3] = torch.nan
    is_nan = linear(x).isnan()
    assert is_nan[7].all()
    assert is_nan.sum() == 48


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_weight_are_read_back_as_they_were(
    library: Library, dtype: torch.dtype
) -> None:
    weight = draw(50, 45, dtype=dtype)
    linear = NativeLinear.pack(weight, None, library=library)
    ids = torch.tensor([0, 49, 17, 17])
    assert torch.equal(linear.lookup(ids), weight[ids])
    assert linear.lookup(ids[:0]).shape == (0, 45)
    assert linear(weight[:0]).shape == (0, 50)


def test_the_packed_weight_goes_with_its_owner(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[int] = []
    real = library.function

    def watched(name: str, arguments: list[object], result: object = None) -> object:
        function = real(name, arguments, result)
        if name != "sl_linear_destroy":
            return function
        return lambda handle: (destroyed.append(handle), function(handle))

    monkeypatch.setattr(library, "function", watched)
    linear = NativeLinear.pack(draw(5, 5, dtype=torch.float32), None, library=library)
    handle, reference = linear.handle, weakref.ref(linear)
    del linear
    gc.collect()
    assert reference() is None
    assert destroyed == [handle]
