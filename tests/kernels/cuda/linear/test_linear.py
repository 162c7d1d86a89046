"""Products with packed integers, emulated: equal to exact arithmetic, and the same bits in every batch."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.adapted import Adapted
from pagewire.kernels.cuda import linear
from pagewire.kernels.cuda.compile import OLDEST
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.linear import PackedWeightLinear, why_not
from pagewire.kernels.cuda.norms import DTYPES
from pagewire.kernels.data.deltas import AdapterWeights, Delta, panels
from pagewire.kernels.data.floats import NO_NUMBER, float8_weight
from pagewire.kernels.data.integers import Integers, integer_weight
from pagewire.kernels.data.weight import UnpackedLinear, Weight, dense_weight
from pagewire.kernels.reference.kernels import reference
from tests.kernels.adapter_rows import make_rows
from tests.kernels.cuda.emulate import ORDERS, EmulatedLauncher, guarded
from tests.kernels.cuda.emulate.worker import emulated

pytestmark = pytest.mark.usefixtures("many_from_65_rows_on")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TABLE = (0, 255, 3, 17, 128, 127, 1, 254, 60, 61, 62, 200, 99, 31, 32, 33)
GROUPS = (None, 16, 32, 64, 128)
SCHEMES = (
    *(Integers(4, group, zero) for group in GROUPS for zero in (8, 0)),
    *(Integers(8, group, zero) for group in GROUPS for zero in (128, 0)),
    *(Integers(6, 16, 32), Integers(6, 32, 0)),
    *(Integers(4, group, 130, TABLE) for group in GROUPS),
)


def make_weight(
    scheme: Integers, n: int, k: int, dtype: torch.dtype, scale_dtype: torch.dtype, offsets: bool
) -> Weight:
    """Codes of every value; scales that differ much."""
    generator = torch.Generator().manual_seed(n + k)
    most = 64 if scheme.bits == 6 else 256
    codes = torch.randint(0, most, (n, k // scheme.per_byte), generator=generator, dtype=torch.uint8)
    shape = (n, k // (scheme.group or k))
    scales = (torch.rand(shape, generator=generator) * 0.02 + 1e-4).to(scale_dtype)
    added = (torch.randn(shape, generator=generator) / 4).to(scale_dtype) if offsets else None
    return integer_weight(scheme, codes, scales, added, dtype)


def make_floats(group: int | None, n: int, k: int, dtype: torch.dtype) -> Weight:
    """Codes of every number, and scales that differ much."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    codes = codes.where(codes & NO_NUMBER != NO_NUMBER, 1)
    scales = torch.rand((n, k // (group or k)), generator=generator) * 0.02 + 1e-4
    return float8_weight(codes.view(torch.float8_e4m3fn), scales, group, dtype)


def make_rows_of_x(count: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows that are nearly equal: what rounding their products would hide shows if most of them is taken away."""
    noise = torch.randn(count, k, generator=torch.Generator().manual_seed(count))
    return guarded((torch.randn(k, generator=torch.Generator().manual_seed(k)) + noise / 64).to(dtype))


def make_bias(weight: Weight) -> Tensor:
    """A bias that takes most of the products of such rows away."""
    row = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    return -(dataclasses.replace(weight, dtype=FP32).dense() @ row).to(weight.dtype)


def make_linear(
    launcher: EmulatedLauncher,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    fewest: bool = False,
    unpacks: bool = False,
) -> PackedWeightLinear:
    """The layer, with its tensors in front of inaccessible memory."""
    layer = PackedWeightLinear(launcher, weight, bias, fewest=fewest, unpacks=unpacks)
    layer.parts = {name: part if part is None else guarded(part) for name, part in layer.parts.items()}
    return layer


def multiply(layer: PackedWeightLinear, x: Tensor) -> Tensor:
    """The product, written to memory in front of inaccessible memory."""
    out = guarded(torch.full((len(x), layer.out_features), torch.nan, dtype=x.dtype))
    layer.multiply(x, out)
    return out


def check(weight: Weight, x: Tensor, result: Tensor, bias: Tensor | None = None) -> None:
    """The result is that of exact arithmetic, but for sums in float32 and one rounding to its dtype."""
    scheme, (codes, scales, *offsets) = weight.scheme, weight.parts
    width = weight.shape[1] // scales.shape[1]
    if isinstance(scheme, Integers):
        exact = scheme.values(weight.parts).double() - scheme.zero
    else:
        exact = codes.view(torch.float8_e4m3fn).double()
    exact *= scales.double().repeat_interleave(width, 1)
    if offsets:
        exact += offsets[0].double().repeat_interleave(width, 1)
    expected, sizes = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    if offsets:  # of the terms that are added apart
        sizes += x.double().abs() @ (exact - offsets[0].double().repeat_interleave(width, 1)).abs().T
    if bias is not None:
        expected += bias.double()
    permitted = expected.abs() * (2**-8 if x.dtype == BF16 else 2**-11) + sizes * 2**-20 + 1e-6
    assert result.shape == expected.shape and result.dtype == x.dtype
    assert bool(((result.double() - expected).abs() <= permitted).all())


launchers = st.builds(
    EmulatedLauncher, order=st.sampled_from(ORDERS), capability=st.sampled_from([OLDEST, HOPPER])
)


@st.composite
def products(draw: st.DrawFn) -> tuple[Weight, Tensor, Tensor | None]:
    """Weights of every kind that is served, and rows for both kernels; the last tile and block are seldom full."""
    scheme, dtype = draw(st.sampled_from(SCHEMES)), draw(st.sampled_from([BF16, FP16]))
    scale_dtype = FP32 if scheme.group is None else draw(st.sampled_from([FP16, BF16]))
    offsets = scheme.group is not None and draw(st.booleans())
    width = max(32, scheme.group or 0)
    k = width * draw(st.integers(1, 640 // width) | st.just(2560 // width))
    weight = make_weight(scheme, draw(st.integers(1, 140)), k, dtype, scale_dtype, offsets)
    x = make_rows_of_x(draw(st.sampled_from([1, 2, 9, 16, 17, 64, 65, 130, 200])), k, dtype)
    bias = make_bias(weight) if draw(st.booleans()) else None
    return weight, x, bias


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(launchers, products())
def test_products(launcher: EmulatedLauncher, drawn: tuple[Weight, Tensor, Tensor | None]) -> None:
    weight, x, bias = drawn
    check(weight, x, multiply(make_linear(launcher, weight, bias), x), bias)


@pytest.mark.every_variant
@pytest.mark.parametrize(("scheme", "dtype"), list(product(SCHEMES, DTYPES)), ids=str)
def test_every_scheme(scheme: Integers, dtype: torch.dtype) -> None:
    """Of all kernels, with every dtype of scales, with and without offsets."""
    for scale_dtype in [FP32] if scheme.group is None else [FP16, BF16]:
        for offsets in (False, True)[: 1 if scheme.group is None else 2]:
            weight = make_weight(scheme, 75, 384, dtype, scale_dtype, offsets)
            layer = make_linear(EmulatedLauncher(), weight)
            for count in (3, 20, 64, 65, 130):
                x = make_rows_of_x(count, 384, dtype)
                check(weight, x, layer(x))


@pytest.mark.parametrize("scheme", [Integers(4, 64, 0), Integers(8, None, 128), Integers(8, 16, 32)], ids=str)
def test_a_row_does_not_depend_on_the_batch(launcher: EmulatedLauncher, scheme: Integers) -> None:
    """Alone, among few rows, and among many, whose kernel is another one. Some slices have no columns."""
    scale_dtype, offsets = (FP32, False) if scheme.group is None else (FP16, True)
    for k in (64, 256, 832, 2624):
        weight = make_weight(scheme, 70, k, BF16, scale_dtype, offsets)
        layer, x = make_linear(launcher, weight, make_bias(weight)), make_rows_of_x(150, k, BF16)
        crowd = layer(x)
        for first, last in ((0, 1), (17, 33), (40, 104), (149, 150), (80, 150)):
            assert torch.equal(layer(guarded(x[first:last])), crowd[first:last])


@pytest.mark.parametrize("group", [None, 32, 64, 128], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bit_floats(launcher: EmulatedLauncher, dtype: torch.dtype, group: int | None) -> None:
    """By both kernels, to the same bits."""
    for k in (128, 384, 2688):
        weight = make_floats(group, 75, k, dtype)
        bias, x = make_bias(weight), make_rows_of_x(150, k, dtype)
        layer = make_linear(launcher, weight, bias)
        crowd = multiply(layer, x)
        check(weight, x, crowd, bias)
        for first, last in ((0, 1), (17, 33), (40, 104), (80, 150)):
            assert torch.equal(multiply(layer, guarded(x[first:last])), crowd[first:last])


@pytest.mark.parametrize("group", [None, 32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_of_8_bit_floats(dtype: torch.dtype, group: int | None) -> None:
    """A row of x with a single 1 has the numbers of a column, to the bit, and NaN where there is one."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    scales = torch.ones(256, 1)
    layer = make_linear(
        EmulatedLauncher(), float8_weight(codes.view(torch.float8_e4m3fn), scales, group, dtype)
    )
    expected = codes[:, 0].view(torch.float8_e4m3fn).float().to(dtype)
    assert int(expected.isnan().sum()) == 2 and len(expected.unique()) == 253 + 2  # two zeros, two NaN
    for count in (32, 96):  # few rows, and many
        x = guarded(torch.eye(32).repeat(count // 32, 1).to(dtype))
        torch.testing.assert_close(layer(x), expected.expand(count, 256), rtol=0, atol=0, equal_nan=True)


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight = make_weight(Integers(4, 32, 8), 40, 64, FP16, FP16, True)
    layer = make_linear(EmulatedLauncher(), weight)
    for count in (5, 70):
        x = make_rows_of_x(count, 64, FP16)
        expected, changed = layer(x), x.clone()
        changed[3, 10], changed[4, 63] = torch.nan, torch.inf
        result = layer(changed)
        assert not result[3:5].isfinite().any() and torch.equal(result[:3], expected[:3])
        assert torch.equal(result[5:], expected[5:])


def test_rows_of_any_shape_and_stride() -> None:
    weight = make_weight(Integers(4, 32, 8), 33, 96, FP16, FP16, False)
    layer = make_linear(EmulatedLauncher(), weight)
    x = make_rows_of_x(6, 96, FP16)
    expected = layer(x)
    assert torch.equal(layer(x.view(2, 3, 96)), expected.view(2, 3, 33))
    wide = torch.cat([x[:, :8], x, x], 1)
    assert torch.equal(layer(wide[:, 8:104]), expected)  # aligned rows, far apart
    assert torch.equal(layer(torch.cat([x[:, :4], x], 1)[:, 4:]), expected)  # rows that are not aligned
    assert torch.equal(layer(x.T.contiguous().T), expected)
    assert layer(x[:0]).shape == (0, 33)
    with pytest.raises(ValueError, match=r"rows of 96 torch\.float16 expected"):
        layer(x.to(BF16))


def test_a_packed_weight_takes_the_memory_of_its_parts() -> None:
    """And of outputs up to a whole block, which is all that is added."""
    bias = torch.zeros(64).half()
    for scheme, scale_dtype in ((Integers(4, 32, 8), FP16), (Integers(8, None, 128), FP32)):
        weight = make_weight(scheme, 64, 128, FP16, scale_dtype, scheme.group is not None)
        assert (
            PackedWeightLinear(EmulatedLauncher(), weight, bias).num_bytes == weight.num_bytes + bias.nbytes
        )
    narrow = PackedWeightLinear(EmulatedLauncher(), weight.slice(0, 33), None)
    assert narrow.num_bytes == 64 * 128 + 33 * 4


def test_large_weights_are_ordered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same order."""
    weight = make_weight(Integers(4, 32, 0), 200, 64, BF16, FP16, True)
    whole = linear.packed_codes(weight)
    monkeypatch.setattr(linear, "BLOCK", 3 * linear.OUTPUTS * 64)
    assert torch.equal(linear.packed_codes(weight), whole)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (dense_weight(torch.randn(32, 64).to(BF16)), "dense weights are neither integers nor 8-bit floats"),
        (
            make_weight(Integers(4, 32, 8), 32, 64, FP32, FP16, False),
            "bfloat16 or float16, not torch.float32",
        ),
        (make_weight(Integers(8, 16, 8), 32, 48, BF16, FP16, False), "48 columns are no multiple of 32"),
        (make_weight(Integers(8, None, 8), 32, 50, BF16, FP16, False), "50 columns are no multiple of 32"),
        (
            make_weight(Integers(4, 32, 8), 32, 64, BF16, FP32, False),
            "scales of groups are bfloat16 or float16",
        ),
        (make_weight(Integers(8, None, 8), 32, 64, BF16, FP16, True), "without groups has no offset"),
        (make_weight(Integers(4, 32, 128), 32, 64, BF16, FP16, False), "4 bits less 128"),
        (make_floats(16, 32, 64, BF16), "groups of 16 8-bit floats are smaller than 32"),
        (make_floats(None, 32, 50, BF16), "50 columns are no multiple of 32"),
        (make_floats(32, 32, 64, FP32), "bfloat16 or float16, not torch.float32"),
    ],
)
def test_weights_without_a_kernel_are_made_dense(weight: Weight, reason: str) -> None:
    assert reason in str(why_not(weight))
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    layer, x = kernels.pack(weight), torch.randn(3, weight.shape[1]).to(weight.dtype)
    assert isinstance(layer, UnpackedLinear) and torch.equal(layer(x), x @ weight.dense().T)
    with pytest.raises(ValueError, match="no kernel for this weight"):
        PackedWeightLinear(EmulatedLauncher(), weight, None)


def test_which_kernels_serve_where_some_are_wrong_or_bits_may_not_depend_on_the_batch() -> None:
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    weight = make_weight(Integers(4, 32, 8), 32, 128, BF16, FP16, False)

    def used() -> tuple[bool, bool]:
        layer = kernels.pack(weight)
        assert isinstance(layer, PackedWeightLinear) and not kernels.replaced
        return layer.fewest, layer.unpacks

    assert used() == (True, True)
    kernels.batch_invariant = True
    assert used() == (False, False)
    kernels.batch_invariant = False
    kernels.replace(linear.UNPACKED)
    assert used() == (True, False)
    kernels.replace(linear.FEWEST)
    assert used() == (False, False)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_fewest_rows(launcher: EmulatedLauncher, scheme: Integers, dtype: torch.dtype) -> None:
    """The last block of outputs is not full; beyond the most rows another kernel multiplies."""
    scale_dtype = FP32 if scheme.group is None else BF16 if dtype == FP16 else FP16
    weight = make_weight(scheme, 70, 384, dtype, scale_dtype, scheme.group is not None)
    bias = make_bias(weight)
    layer = make_linear(launcher, weight, bias, fewest=True)
    assert layer.fewest
    for count in (1, 5, 8, 9):
        x = make_rows_of_x(count, 384, dtype)
        check(weight, x, multiply(layer, x), bias)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked_integers(launcher: EmulatedLauncher, scheme: Integers, dtype: torch.dtype) -> None:
    """In two parts, of which the last block of outputs is not full, and the last steps are fewer than warps."""
    scale_dtype = FP32 if scheme.group is None else BF16 if dtype == FP16 else FP16
    weight = make_weight(scheme, 70, 384, dtype, scale_dtype, scheme.group is not None)
    check_unpacked(make_linear(launcher, weight), weight)


@pytest.mark.parametrize("group", [None, 32, 128], ids=str)
def test_unpacked_floats(launcher: EmulatedLauncher, group: int | None) -> None:
    weight = make_floats(group, 70, 384, BF16)
    check_unpacked(make_linear(launcher, weight), weight)


def check_unpacked(layer: PackedWeightLinear, weight: Weight) -> None:
    """Each number is the code's less zero, times the scale, plus the offset, rounded once."""
    num_out, num_in = weight.shape
    first, rest = (
        guarded(torch.full((count, num_in), torch.nan, dtype=weight.dtype)) for count in (32, num_out - 32)
    )
    layer.unpack(0, first)
    layer.unpack(32, rest)
    found = torch.cat([first, rest])
    exact = dataclasses.replace(weight, dtype=FP32).dense()
    permitted = exact.abs() * (2**-8 if weight.dtype == BF16 else 2**-11) + 1e-6
    assert found.shape == weight.shape and found.dtype == weight.dtype
    assert bool(((found.float() - exact).abs() <= permitted).all())


@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_are_unpacked_for_many_rows(
    launcher: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch, has_bias: bool
) -> None:
    """A part at a time; the last is smaller."""
    monkeypatch.setattr(linear, "UNPACKED_BYTES", 64 * 256 * 2)
    weight = make_weight(Integers(4, 64, 8), 150, 256, BF16, FP16, False)
    bias = make_bias(weight) if has_bias else None
    layer, x = (
        make_linear(launcher, weight, bias, unpacks=True),
        make_rows_of_x(linear.LEAST_UNPACKED, 256, BF16),
    )
    result = multiply(layer, x)
    dense = torch.empty(150, 256, dtype=BF16)
    layer.unpack(0, dense)
    expected = torch.nn.functional.linear(x, dense, bias)
    torch.testing.assert_close(result, expected, rtol=2**-7, atol=2**-7)
    packed = make_linear(launcher, weight, bias)
    few = x[:-1]
    assert torch.equal(layer(few), packed(few)) and not torch.equal(result, packed(x))


def test_a_replaced_kernel_makes_weights_dense() -> None:
    weight, kernels = (
        make_weight(Integers(4, 32, 8), 32, 64, BF16, FP16, False),
        CudaKernels(EmulatedLauncher(), "cpu"),
    )
    assert isinstance(kernels.pack(weight), PackedWeightLinear)
    kernels.replace("pack")
    assert isinstance(kernels.pack(weight), UnpackedLinear)


def test_shares_of_ranks() -> None:
    """Shares of outputs have the bits of the whole; those of columns add up to it."""
    weight, x = make_weight(Integers(4, 32, 8), 128, 256, FP16, FP16, True), make_rows_of_x(5, 256, FP16)
    whole = PackedWeightLinear(EmulatedLauncher(), weight, None)(x)
    rows = [PackedWeightLinear(EmulatedLauncher(), weight.rows(part, 2), None)(x) for part in range(2)]
    assert torch.equal(torch.cat(rows, 1), whole)
    columns = [
        PackedWeightLinear(EmulatedLauncher(), weight.columns(part, 2), None)(
            x[:, 128 * part : 128 * part + 128]
        )
        for part in range(2)
    ]
    torch.testing.assert_close(sum(columns), whole, rtol=2**-8, atol=2**-6)


def test_adapters_change_packed_products() -> None:
    weight, x = make_weight(Integers(4, 32, 8), 40, 64, BF16, FP16, False), make_rows_of_x(3, 64, BF16)
    delta = Delta(torch.randn(4, 64).to(BF16), panels(torch.randn(40, 4).to(BF16)), 0, 40)
    adapter = AdapterWeights([[delta]], ((40, 64),), BF16)
    rows = make_rows([adapter], [0, -1, 0])
    layer = PackedWeightLinear(EmulatedLauncher(), weight, None)
    expected = layer(x)
    reference.adapt(x, expected, rows, 0)
    with emulated(EmulatedLauncher()):
        adapted = Adapted(layer, 0, lambda: rows)
        result = adapted(x)
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=0.1)
    assert adapted.num_bytes == layer.num_bytes and torch.equal(result[1], layer(x)[1])


def test_which_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of rows, how many blocks the kernel for many rows would have, and the device."""
    launched: list[str] = []
    monkeypatch.setattr(
        EmulatedLauncher, "launch", lambda self, variant, *_: launched.append(variant.name[7:11])
    )
    for num_out, multiprocessors in ((257, 4), (257, 3)):
        weight = make_weight(Integers(8, None, 128), num_out, 32, FP16, FP32, False)
        launcher = EmulatedLauncher(multiprocessors=multiprocessors)
        layer = PackedWeightLinear(launcher, weight, None, fewest=False)
        for count in (1, 48, 49, 64, 65):
            layer(torch.zeros(count, 32).half())
    assert launched == ["few<", "few<", "few<", "few<", "many", "few<", "few<", "many", "many", "many"]
    launched.clear()
    for unpacks in (True, False):
        layer = PackedWeightLinear(EmulatedLauncher(), weight, None, unpacks=unpacks)
        for count in (191, 192):
            layer(torch.zeros(count, 32).half())
    assert launched == ["many", "unpa", "many", "many"]


def test_no_launch_needs_a_kernel_that_is_not_loaded() -> None:
    """Graphs are recorded of what is loaded; packing loads all kernels."""
    loaded: list[str] = []

    @dataclasses.dataclass
    class Loading(EmulatedLauncher):
        def load(self, variants: object, progress: object = None) -> None:
            loaded.extend(variant.name for variant in variants)  # type: ignore[attr-defined]

    weight = make_weight(Integers(8, 128, 128), 32, 128, FP16, BF16, False)
    PackedWeightLinear(Loading(), weight, None)
    assert loaded == [f"linear_{name}<fp16, byte_codes, bf16, 32>" for name in linear.KERNELS]
