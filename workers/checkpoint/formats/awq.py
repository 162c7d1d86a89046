"""AWQ checkpoints: integers of 4 bits with a zero for each group of columns, in the layouts of AutoAWQ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagewire.workers.checkpoint.formats.checks import (
    check_complete,
    check_divides,
    check_shape,
    integer_setting,
    marlin_shape,
    need,
    need_scales,
    parts_by_module,
    switch,
)
from pagewire.workers.checkpoint.formats.format import Dtype, Held, Parts, Tensors, Weight, described, grouped
from pagewire.workers.errors import LoadError

BITS = 4
PER_WORD = 32 // BITS
VERSIONS = ("gemm", "gemv", "marlin")


def of(config: Mapping[str, Any]) -> AwqFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        LoadError: this kind of AWQ is not served.
    """
    bits = integer_setting(config, ("bits", "w_bit"), BITS)
    if bits != BITS:
        raise LoadError(f"AWQ of {bits} bits is not served; {BITS} bits are")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version not in VERSIONS:
        raise LoadError(f"AWQ of version {version!r} is not served; {', '.join(VERSIONS)} are")
    group = integer_setting(config, ("group_size", "q_group_size"), 128)
    if group != -1 and group < 1:
        raise LoadError(f"AWQ with groups of {group} columns is not served")
    if switch(config, "zero_point", True) == (version == "marlin"):
        raise LoadError(f"AWQ of version {version!r} is served only with zero_point={version != 'marlin'}")
    return AwqFormat(version, group)


class AwqFormat:
    """How matrices lie in an AWQ checkpoint, all in one of three layouts.

    - gemm: qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N]
    - gemv: qweight int32 [N, K / 8], qzeros int32 [N, Z], scales [N, 8 * Z]; Z is G / 8, rounded up
    - marlin: qweight int32 [K / 16, 2 * N], scales [G, N]; all zeros are 8
    """

    name = "awq"

    def __init__(self, version: str, group: int) -> None:
        """group: columns with a scale; -1: all of a row."""
        self._version, self._group = version, group
        self._needed = {"qweight", "scales"} | ({"qzeros"} if version != "marlin" else set())
        self.suffixes = frozenset({"qweight", "qzeros", "scales"})

    def check(self, names: Iterable[str]) -> None:
        """See `Format.check`."""
        names = list(names)
        for module, has in parts_by_module(names, self.suffixes).items():
            if has == {"scales"}:
                raise LoadError(
                    f"{module}.scales multiplies activations, which is not served in AWQ checkpoints"
                )
        check_complete(names, self._needed, self.suffixes)

    def stored(self, name: str, tensors: Parts) -> Held:
        """See `Format.stored`."""
        if self._version == "marlin":
            return marlin_shape(name, tensors, "qweight", "scales", self._group)
        words, zeros = (need(name, tensors, suffix, "I32") for suffix in ("qweight", "qzeros"))
        if self._version == "gemm":
            num_in, num_out = words.shape[0], words.shape[1] * PER_WORD
            check_divides(name, "columns", num_in, 2)
        else:
            num_in, num_out = words.shape[1] * PER_WORD, words.shape[0]
        group = num_in if self._group == -1 else self._group
        check_divides(name, "columns", num_in, group)
        num_groups = num_in // group
        if self._version == "gemm":
            check_shape(name, "qzeros", zeros, (num_groups, words.shape[1]))
            need_scales(name, tensors, "scales", (num_groups, num_out))
        else:
            if zeros.shape[0] != num_out or zeros.shape[1] * PER_WORD < num_groups:
                raise LoadError(f"{name}.qzeros does not hold {num_groups} zeros for {num_out} outputs")
            need_scales(name, tensors, "scales", (num_out, zeros.shape[1] * PER_WORD))
        return (num_out, num_in), grouped(BITS, num_in, group, tensors["scales"], has_zeros=True)

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """See `Format.weight`."""
        import torch

        from pagewire.workers.checkpoint.formats.grouped import GroupedIntegers
        from pagewire.workers.checkpoint.formats.marlin import marlin_integers
        from pagewire.workers.checkpoint.formats.packing import awq_gemm, unpacked

        (_, num_in), _ = self.stored(name, described(tensors))
        if self._version == "marlin":
            return marlin_integers(name, tensors, "qweight", "scales", self._group).weight(dtype)
        group = num_in if self._group == -1 else self._group
        if self._version == "gemm":
            codes, zeros, scales = awq_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"])
        else:
            codes = tensors["qweight"].contiguous().view(torch.uint8)
            num_groups = num_in // group
            zeros = unpacked(tensors["qzeros"], BITS)[:, :num_groups]
            scales = tensors["scales"][:, :num_groups]
        return GroupedIntegers(f"{name}.scales", BITS, num_in, codes, scales, zeros, group).weight(dtype)
