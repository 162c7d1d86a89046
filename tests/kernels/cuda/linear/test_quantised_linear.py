"""Products of rows in 8 bits, emulated: the bits of the reference, and the same ones in every batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cuda.compile import OLDEST
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.launch import HOPPER, KernelLauncher
from pagewire.kernels.cuda.linear import PackedWeightLinear, TiledLinear
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.cuda.quantised_linear import (
    FLOATS,
    INTEGERS,
    QuantisedRows,
    QuantisedRowsLinear,
    empty_rows,
    quantise_rows,
    why_not,
)
from pagewire.kernels.data.floats import Floats
from pagewire.kernels.data.integers import INT8, Integers
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.reference.quantised import (
    FLOAT_COLUMNS,
    float_rows,
    quantised_linear,
    quantised_rows,
)
from tests.kernels.cuda.emulate import EmulatedLauncher, guarded
from tests.kernels.cuda.linear.test_linear import FP32, make_bias, make_floats, make_rows_of_x, make_weight

pytestmark = pytest.mark.usefixtures("many_from_65_rows_on")

BF16, FP16 = torch.bfloat16, torch.float16
ADA, NEWEST = (8, 9), (12, 0)
COUNTS = (1, 3, 16, 17, 64, 65, 200)


def rounding(weight: Weight) -> Weight:
    """A weight of a checkpoint whose activations are quantised, too."""
    assert isinstance(weight.scheme, Integers | Floats)
    return replace(weight, scheme=replace(weight.scheme, rounds_rows=True))


def integers(n: int, k: int, dtype: torch.dtype, scale_dtype: torch.dtype = FP32) -> Weight:
    return rounding(make_weight(INT8, n, k, dtype, scale_dtype, False))


def floats(group: int | None, n: int, k: int, dtype: torch.dtype) -> Weight:
    return rounding(make_floats(group, n, k, dtype))


def layer_of(launcher: EmulatedLauncher, weight: Weight, bias: Tensor | None = None) -> QuantisedRowsLinear:
    """The layer, with its tensors in front of inaccessible memory."""
    layer = QuantisedRowsLinear(launcher, weight, bias)
    layer.parts = {name: part if part is None else guarded(part) for name, part in layer.parts.items()}
    return layer


def rows_of(count: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, one of zeros, and some of whose products `make_bias` takes most away."""
    generator = torch.Generator().manual_seed(count + k)
    x = torch.randn(count, k, generator=generator) * torch.logspace(-4, 1, count)[:, None]
    x[count // 2] = 0
    x[1::3] = make_rows_of_x(count, k, dtype)[1::3].float()
    return guarded(x.to(dtype))


def round_rows(launcher: KernelLauncher, x: Tensor, kind: str) -> QuantisedRows:
    """Written to memory in front of inaccessible memory."""
    rounded = QuantisedRows(*(guarded(part) for part in empty_rows(x, kind)))
    quantise_rows(launcher, x, kind, rounded)
    return rounded


def multiply(layer: QuantisedRowsLinear, x: Tensor) -> Tensor:
    """The product of rows that lie in front of inaccessible memory, as its result does."""
    rounded = round_rows(layer.launcher, x, layer.kind)
    out = guarded(torch.full((len(x), layer.out_features), torch.nan, dtype=x.dtype))
    layer.launch(rounded.codes.view(torch.int16), rounded.scales, out)
    return out


def check_floats(weight: Weight, x: Tensor, result: Tensor, bias: Tensor | None = None) -> None:
    """The result is that of exact arithmetic with the rounded rows, but for sums in float32."""
    codes, scales = float_rows(x.float())
    rows = codes.double() * scales.double().repeat_interleave(FLOAT_COLUMNS, 1)[:, : x.shape[1]]
    exact = weight.parts[0].view(torch.float8_e4m3fn).double()
    exact *= weight.parts[1].double().repeat_interleave(x.shape[1] // weight.parts[1].shape[1], 1)
    expected, sizes = rows @ exact.T, rows.abs() @ exact.abs().T
    if bias is not None:
        expected, sizes = expected + bias.double(), sizes + bias.double().abs()
    permitted = expected.abs() * (2**-8 if x.dtype == BF16 else 2**-11) + sizes * 2**-20 + 2**-24
    assert result.dtype == x.dtype and bool(((result.double() - expected).abs() <= permitted).all())


def check(weight: Weight, count: int, launcher: EmulatedLauncher) -> None:
    """Many rows, then few of them, give the reference's numbers, with a bias and without."""
    x = rows_of(count, weight.shape[1], weight.dtype)
    for bias in (make_bias(weight), None):
        layer = layer_of(launcher, weight, bias)
        result = multiply(layer, x)
        if isinstance(weight.scheme, Integers):
            assert torch.equal(result, quantised_linear(x, weight, bias, finer_codes=False))
        else:
            check_floats(weight, x, result, bias)
        for start, stop in ((0, 1), (count // 3, count // 3 + 20), (count - 1, count)):
            some = guarded(x[start:stop].contiguous())
            assert torch.equal(multiply(layer, some), result[start:stop])


SHAPES = ((1, 64), (33, 192), (75, 1088), (130, 640))


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_integers(count: int, n: int, k: int) -> None:
    """To the bit; the last tiles are seldom full, and some slices have no columns."""
    check(integers(n, k, BF16), count, EmulatedLauncher())


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_8_bit_floats(count: int, n: int, k: int) -> None:
    check(floats(None, n, k, BF16), count, EmulatedLauncher(capability=ADA))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_order_and_dtype(launcher: EmulatedLauncher, dtype: torch.dtype) -> None:
    """Also scales in 16 bits, and scales of 128 and of 64 columns."""
    launcher = replace(launcher, capability=ADA)
    for weight in (
        integers(75, 2624, dtype, dtype),
        floats(None, 75, 1600, dtype),
        floats(128, 75, 2688, dtype),
        floats(64, 40, 704, dtype),
    ):
        check(weight, 85, launcher)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_as_the_reference_does(launcher: EmulatedLauncher, dtype: torch.dtype) -> None:
    """Ties, zeros, the smallest and the largest numbers, and infinities and NaN, which make the scale NaN."""
    k = 4160  # more than a block takes at a time, and half a group of 128
    x = rows_of(20, k, dtype)
    limits = torch.finfo(dtype)
    x[0, :9] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 63.5, -62.5])
    x[0, 9:] = 0
    x[1] = 0
    x[1, 7::8], x[2, 200] = limits.smallest_normal * limits.eps, limits.max
    x[3, 4100], x[4, 5], x[5, 130] = torch.nan, torch.inf, -torch.inf
    x = guarded(x)
    codes, scales = round_rows(launcher, x, INTEGERS)
    exact, expected, _ = quantised_rows(x.float(), k)
    torch.testing.assert_close(scales, expected[:, 0], rtol=0, atol=0, equal_nan=True)
    assert bool(scales[3:6].isnan().all()) and int(scales.isnan().sum()) == 3
    finite = scales.isfinite()
    assert torch.equal(codes[finite].double(), exact[finite])
    assert codes[0, :9].tolist() == [127, 0, 2, 2, 0, -2, 126, 64, -62]
    codes, scales = round_rows(launcher, x, FLOATS)
    values, expected = float_rows(x.float())
    assert tuple(scales.shape) == (33, 20) and int(scales.isnan().sum()) == 3
    torch.testing.assert_close(scales.T, expected, rtol=0, atol=0, equal_nan=True)
    finite = scales.T.isfinite().repeat_interleave(FLOAT_COLUMNS, 1)[:, :k]
    assert torch.equal(codes.float()[finite], values.float()[finite])


def test_what_is_not_finite_stays_in_its_row(launcher: EmulatedLauncher) -> None:
    weights = (integers(40, 192, FP16), floats(64, 40, 192, FP16))
    for weight, count in product(weights, (5, 70)):
        layer = layer_of(replace(launcher, capability=ADA), weight)
        x = torch.randn(count, 192, generator=torch.Generator().manual_seed(0)).half()
        expected, changed = layer(x), x.clone()
        changed[2, 10], changed[3, 191], changed[4, 64] = torch.nan, torch.inf, -torch.inf
        result = layer(changed)
        assert bool(result[2:5].isnan().all()) and torch.equal(result[:2], expected[:2])
        assert torch.equal(result[5:], expected[5:])


def test_integers_add_up_without_overflow() -> None:
    """The largest sums that a weight may have, in the longest rows: 127 x 128 x 65,536."""
    weight = integers(3, 1 << 16, BF16)
    weight.parts[0].fill_(0)  # -128
    x = torch.ones(1, 1 << 16, dtype=BF16)
    result = layer_of(EmulatedLauncher(), weight)(x)
    assert torch.equal(result, quantised_linear(x, weight, finer_codes=False))


def test_rows_of_any_shape_and_stride() -> None:
    weight = integers(33, 128, FP16)
    layer, x = layer_of(EmulatedLauncher(), weight), rows_of(6, 128, FP16)
    expected = layer(x)
    assert torch.equal(layer(x.view(2, 3, 128)), expected.view(2, 3, 33))
    wide = torch.cat([x[:, :8], x, x], 1)
    assert torch.equal(layer(wide[:, 8:136]), expected)  # aligned rows, far apart
    assert torch.equal(layer(torch.cat([x[:, :4], x], 1)[:, 4:]), expected)  # rows that are not aligned
    assert layer(x[:0]).shape == (0, 33)
    with pytest.raises(ValueError, match=r"rows of 128 torch\.float16 expected"):
        layer(x.to(BF16))


def test_shares_of_ranks() -> None:
    """Shares of outputs have the bits of the whole."""
    for weight in (integers(128, 256, FP16), floats(128, 128, 256, FP16)):
        x, launcher = rows_of(5, 256, FP16), EmulatedLauncher(capability=ADA)
        whole = QuantisedRowsLinear(launcher, weight, None)(x)
        rows = [QuantisedRowsLinear(launcher, weight.rows(part, 2), None)(x) for part in range(2)]
        assert torch.equal(torch.cat(rows, 1), whole)


def test_a_weight_takes_the_memory_that_it_takes_with_rows_in_16_bits() -> None:
    """So estimates hold for both."""
    launcher = EmulatedLauncher(capability=ADA)
    for weight in (integers(70, 192, BF16), floats(None, 70, 192, BF16), floats(64, 70, 192, BF16)):
        sizes = {kind(launcher, weight, None).num_bytes for kind in (QuantisedRowsLinear, PackedWeightLinear)}
        assert len(sizes) == 1


def test_only_checkpoints_whose_activations_are_quantised_have_rows_in_8_bits() -> None:
    """And only where the device has such products, and trials found them right."""
    kernels = CudaKernels(EmulatedLauncher(capability=OLDEST), "cpu")
    ada = CudaKernels(EmulatedLauncher(capability=ADA), "cpu")
    int8, fp8 = integers(8, 64, BF16), floats(None, 8, 64, BF16)
    weight_only = replace(int8, scheme=INT8)
    kinds = [type(on.pack(weight)) for on in (kernels, ada) for weight in (int8, fp8, weight_only)]
    rounded: list[type[TiledLinear]] = [QuantisedRowsLinear, PackedWeightLinear, PackedWeightLinear]
    assert kinds == [*rounded, QuantisedRowsLinear, *rounded[::2]]
    ada.replace(INTEGERS)
    assert isinstance(ada.pack(int8), PackedWeightLinear) and isinstance(ada.pack(fp8), QuantisedRowsLinear)
    assert not ada.replaced


@pytest.mark.parametrize(
    ("weight", "capability", "reason"),
    [
        (
            dense_weight(torch.randn(32, 64).to(BF16)),
            ADA,
            "dense weights are neither integers nor 8-bit floats",
        ),
        (integers(8, 64, FP32), ADA, "bfloat16 or float16, not torch.float32"),
        (make_weight(INT8, 8, 64, BF16, FP32, False), ADA, "nothing of activations in 8 bits"),
        (integers(8, 96, BF16), ADA, "96 columns are no multiple of 64"),
        (
            rounding(make_weight(Integers(8, 32, 128), 8, 64, BF16, FP16, False)),
            ADA,
            "int8/32-128 with rounded rows weights are not 8 bits around 128 in whole rows",
        ),
        (rounding(make_weight(Integers(4, None, 8), 8, 64, BF16, FP32, False)), ADA, "int4/row-8"),
        (rounding(make_weight(Integers(8, None, 127), 8, 64, BF16, FP32, False)), ADA, "int8/row-127"),
        (floats(None, 8, 64, BF16), OLDEST, "8.0 has no fast products of 8-bit floats"),
        (floats(None, 8, 64, BF16), HOPPER, "9.0 has no fast products"),
        (floats(32, 8, 64, BF16), ADA, "groups of 32 8-bit floats are smaller than 64"),
        (floats(64, 8, 64, BF16), NEWEST, ""),
        (integers(8, 64, BF16), OLDEST, ""),
    ],
)
def test_reasons_for_rows_in_16_bits(weight: Weight, capability: tuple[int, int], reason: str) -> None:
    found = why_not(weight, capability)
    assert reason in str(found) if reason else found is None
    if reason:
        with pytest.raises(ValueError, match="rows are not rounded for this weight"):
            QuantisedRowsLinear(EmulatedLauncher(capability=capability), weight, None)
