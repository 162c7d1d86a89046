"""Matrices as a compressed-tensors checkpoint holds them: 8 or 4 bits, for each output or in groups of inputs.

`W = (code - zero) * scale`. With groups, codes lie in int32 words, the first in the lowest bits (`pack-quantized`,
for activations of 16 bits); without, as int8 (`int-quantized`, for activations that are quantised for each token).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagewire.cli.quantise.shards import PlannedTensor

GROUPS = (32, 64, 128)
"""Sizes of groups that other engines read, too."""
WORD = 32
SEARCH = torch.linspace(0.8, 1.1, 16).tolist()
"""Shares of a group's range that are tried for 4 bits: less makes steps finer, more makes up for rounded zeros."""


class _Fit(NamedTuple):
    """A way of holding groups: codes [N, G, group]; scales, zeros and squares of errors [N, G, 1]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    errors: Tensor


@dataclass(frozen=True)
class CompressedIntegers:
    """A scheme of compressed-tensors: how a matrix is quantised, stored and described."""

    bits: int
    """8 or 4."""
    group: int | None
    """Inputs that share a scale; None: all of an output."""

    @property
    def symmetric(self) -> bool:
        """False if groups have an integer that stands for 0: with 16 codes, each that is not used counts."""
        return self.bits == 8

    def quantization_config(self, ignored: Iterable[str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint. ignored: names of modules that are not quantised."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group,
            "dynamic": False,
        }
        tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.group else "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None if self.group else tokens,
                    "output_activations": None,
                }
            },
            "ignore": sorted(ignored),
            "kv_cache_scheme": None,
        }

    def entries(self, module: str, shape: tuple[int, int], dtype: torch.dtype) -> list[PlannedTensor]:
        """The tensors of a module's matrix [N, K]. dtype: of the dense matrix, which the scales have, too."""
        rows, columns = shape
        parts: dict[str, tuple[torch.dtype, tuple[int, ...]]]
        if self.group is None:
            parts = {"weight": (torch.int8, shape), "weight_scale": (dtype, (rows, 1))}
        else:
            groups = columns // self.group
            parts = {
                "weight_packed": (torch.int32, (rows, columns * self.bits // WORD)),
                "weight_scale": (dtype, (rows, groups)),
                "weight_shape": (torch.int64, (2,)),
            }
            if not self.symmetric:
                parts["weight_zero_point"] = (torch.int32, (-(-rows * self.bits // WORD), groups))
        return [PlannedTensor(f"{module}.{suffix}", *part) for suffix, part in parts.items()]

    def quantised(self, dense: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors of a matrix [N, K] by suffix, without `weight_shape`, and what they stand for, float32.

        Those of several matrices, one below the other, can be joined if each N but the last is a multiple of 8.
        """
        groups = dense.float().unflatten(1, (-1, self.group or dense.shape[1]))  # type: ignore[no-untyped-call]
        codes, scales, zeros, _ = self._nearest(groups, dense.dtype)
        restored = ((codes - zeros) * scales.float()).flatten(1)
        unsigned = codes.to(torch.uint8).flatten(1)
        parts = {"weight_scale": scales.flatten(1)}
        if self.group is None:
            parts["weight"] = (unsigned ^ 128).view(torch.int8)
        else:
            parts["weight_packed"] = packed(unsigned, self.bits)
        if not self.symmetric:
            parts["weight_zero_point"] = packed(zeros.to(torch.uint8).flatten(1).T, self.bits).T
        return parts, restored

    def _nearest(self, groups: Tensor, dtype: torch.dtype) -> _Fit:
        """Codes from 0, scales in `dtype`, and zeros, of the least squares of errors, for groups [N, G, group]."""
        shares = SEARCH if self.bits == 4 else [1.0]
        best = self._fit(groups, shares[0], dtype)
        for share in shares[1:]:
            fit = self._fit(groups, share, dtype)
            better = fit.errors < best.errors
            best = _Fit(*(torch.where(better, new, old) for new, old in zip(fit, best, strict=True)))
        return best

    def _fit(self, groups: Tensor, share: float, dtype: torch.dtype) -> _Fit:
        scales, zeros = self._range(groups, share, dtype)
        codes = (groups / scales.float() + zeros).round().clamp(0, 2**self.bits - 1)
        errors = ((codes - zeros) * scales.float() - groups).square().sum(-1, keepdim=True)
        return _Fit(codes, scales, zeros, errors)

    def _range(self, groups: Tensor, share: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales and zeros of groups if a share of their range is kept; 0 is always within it."""
        most = 2**self.bits - 1
        if self.symmetric:
            zeros = torch.full(groups.shape[:2], 2.0 ** (self.bits - 1))[..., None]
            return nonzero(groups.abs().amax(-1, keepdim=True) * share / (most // 2), dtype), zeros
        low = groups.amin(-1, keepdim=True).clamp(max=0) * share
        high = groups.amax(-1, keepdim=True).clamp(min=0) * share
        scales = nonzero((high - low) / most, dtype)
        return scales, (-low / scales.float()).round().clamp(0, most)


def nonzero(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in a dtype, none of them 0 or infinite; a group of zeros has the scale 1."""
    limits = torch.finfo(dtype)
    return torch.where(scales > 0, scales.clamp(limits.smallest_normal, limits.max), 1.0).to(dtype)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K] in words int32 [N, K * bits / 32], rounded up, the first code in the lowest bits."""
    rows, columns = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -columns % (WORD // bits)))
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes.reshape(-1).view(torch.int32).view(rows, -1)
