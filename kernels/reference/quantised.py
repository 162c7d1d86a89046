"""Products with quantised weights in plain PyTorch: the definition of their bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.weight import Weight, check_rows

CODES = 127
"""The largest code of an activation; codes are symmetric around 0."""
LEAST_SHARED = 32
"""Columns of a row that share a scale, at least."""
FLOAT_COLUMNS = 128
"""Columns of a row in 8-bit floats that share a scale."""


def quantised_linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, *, finer_codes: bool = True
) -> Tensor:
    """The product with a weight whose scheme is `Integers`, to the bits of every compiled kernel.

    The rows of x are quantised as well. Where the weight has groups, the largest |x| of every 256 columns (128
    where groups are larger than 32), the first of equal ones, is an outlier: it is multiplied as it is, and counts
    as 0 in its group. A group of max(32, `scheme.group`) columns of a row, or the whole row where the weight has no
    groups, becomes `code = rint(t)` with `t = x * (127 / max|x|)` and the scale `max|x| / 127`, in float32. With S
    and P, the sums of `code * (value - zero)` and of `code` over one of the weight's groups, and the groups in
    ascending order:

        y = fma(float(S), scale_x * scale_w, y)
        y = fma(float(P) * scale_x, offset_w, y)      where the weight has offsets

    S and P are exact. Outliers follow in ascending order, each as a group of one column with S = value - zero, P =
    1 and scale_x = x. Where the weight has no groups there are finer codes instead, `rint((t - code) * 254)`, which
    follow with the scale divided by 254. Then the bias is added, and the sum is rounded to the dtype. A NaN or an
    infinity in a row makes the row's outputs NaN.

    Args:
        x: [..., K], of the weight's dtype.
        weight: [N, K].
        bias: [N], of the same dtype.
        finer_codes: false for the product of a GPU (`cuda.quantised_linear`), whose rows have none.

    Returns:
        [..., N].
    """
    scheme = weight.scheme
    assert isinstance(scheme, Integers)
    num_out, num_in = weight.shape
    rows = x.reshape(-1, num_in).float()
    y = torch.zeros(len(rows), num_out, device=x.device)
    if scheme.group is None:
        codes, row_scales, finer = quantised_rows(rows, num_in)
        y = _add_groups(y, codes, row_scales, weight)
        if finer_codes:
            y = _add_groups(y, finer, row_scales / torch.full_like(row_scales, 2 * CODES), weight)
    else:
        outliers, at = _outliers(rows, 256 if scheme.group <= LEAST_SHARED else 128)
        codes, row_scales, _ = quantised_rows(rows.scatter(1, at, 0.0), max(LEAST_SHARED, scheme.group))
        y = _add_groups(y, codes, row_scales, weight)
        y = _add_outliers(y, outliers, at, weight)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], num_out)


def _outliers(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """An outlier of each block of columns of rows [M, K], NaN if not finite, and their columns: both [M, n]."""
    magnitude = rows.abs().nan_to_num(torch.inf, posinf=torch.inf)
    blocks = torch.unflatten(
        functional.pad(magnitude, (0, -rows.shape[1] % block), value=-1.0), 1, (-1, block)
    )
    at = blocks.argmax(-1) + torch.arange(blocks.shape[1], device=rows.device) * block
    outliers = rows.gather(1, at)
    return torch.where(outliers.isfinite(), outliers, torch.nan), at


def quantised_rows(rows: Tensor, shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes float64 [M, K] of rows float32 [M, K], their scales, and their finer codes.

    shared: columns that have one scale. scales: [M, K / shared], rounded up.
    """
    exact, scales = _scaled_rows(rows, shared, CODES)
    codes = exact.round()
    finer = ((exact - codes) * (2 * CODES)).round()
    return codes.double(), scales, finer.double()


def float_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [M, K] of rows float32 [M, K], and their scales [M, K / 128], rounded up.

    The nearest codes, even ones where two are as near, of a row times `448 / max|x|`, by which the largest |x| of
    128 columns becomes the largest e4m3. The scale is `max|x| / 448`, NaN where a number is not finite.
    """
    most = torch.finfo(torch.float8_e4m3fn).max
    exact, scales = _scaled_rows(rows, FLOAT_COLUMNS, most)
    return exact.clamp(-most, most).to(torch.float8_e4m3fn), scales


def _scaled_rows(rows: Tensor, shared: int, most: float) -> tuple[Tensor, Tensor]:
    """Rows [M, K] of which the largest magnitude of each `shared` columns is about `most`, and their scales.

    Where a number is not finite, 0, and the scale is NaN.
    """
    num_in = rows.shape[1]
    groups = torch.unflatten(functional.pad(rows, (0, -num_in % shared)), 1, (-1, shared))
    largest = groups.abs().amax(-1, keepdim=True)  # NaN where there is one
    # A tensor: PyTorch divides by numbers, and numbers by tensors, otherwise.
    reach = torch.full_like(largest, most)
    inverse = torch.where(largest > 0, reach / largest, 0.0).clamp(max=torch.finfo(torch.float32).max)
    exact = torch.where(largest.isfinite(), groups * inverse, 0.0)
    scales = torch.where(largest.isfinite(), largest / reach, torch.nan)
    return exact.flatten(1)[:, :num_in], scales[..., 0]


def _add_groups(y: Tensor, codes: Tensor, row_scales: Tensor, weight: Weight) -> Tensor:
    """y [M, N] with the products of a weight's groups added; codes and scales: see `quantised_rows`."""
    scheme = weight.scheme
    assert isinstance(scheme, Integers)
    _, scales, *offsets = weight.parts
    group = scheme.group or weight.shape[1]
    values = scheme.values(weight.parts).double() - scheme.zero
    shared = max(LEAST_SHARED, group)
    for start in range(0, weight.shape[1], group):
        of_group, i = slice(start, start + group), start // group
        row_codes, row_scale = codes[:, of_group], row_scales[:, start // shared, None]
        sums = row_codes @ values[:, of_group].T  # exact in float64
        y = _fma(sums.float(), row_scale * scales[:, i].float(), y)
        if offsets:
            y = _fma(row_codes.sum(1, keepdim=True).float() * row_scale, offsets[0][:, i].float(), y)
    return y


def _add_outliers(y: Tensor, outliers: Tensor, at: Tensor, weight: Weight) -> Tensor:
    """y [M, N] with the products of outliers added; see `_outliers`."""
    scheme = weight.scheme
    assert isinstance(scheme, Integers) and scheme.group is not None
    _, scales, *offsets = weight.parts
    values = scheme.values(weight.parts).float() - scheme.zero
    for outlier, columns in zip(torch.split(outliers, 1, 1), at.T, strict=True):
        groups = columns // scheme.group
        y = _fma(values.T[columns], outlier * scales.T[groups].float(), y)
        if offsets:
            y = _fma(outlier, offsets[0].T[groups].float(), y)
    return y


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` in float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which float32's rounding cannot tell from the
    exact sum (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, other = a.double() * b.double(), c.double()
    total = product + other
    back = total - product
    error = (product - (total - back)) + (other - back)
    bits = total.view(torch.int64)
    even = (error.abs() > 0) & (bits & 1 == 0)  # false for NaN
    away = (error > 0) == (total > 0)
    return torch.where(even, torch.where(away, bits + 1, bits - 1), bits).view(torch.float64).float()


class UnpackedQuantisedLinear:
    """`quantised_linear` over a weight that stays as it is."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        check_rows(x, self.in_features, self.dtype)
        return quantised_linear(x, self._weight, self._bias)
