"""What a reader of a quantised checkpoint does: it makes a `Weight` of the tensors that hold a matrix together.

Readers import torch only where they read: what headers say is known without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.workers.checkpoint.headers import DTYPES, FLOATS, TensorHeader

if TYPE_CHECKING:
    import torch

    from pagewire.kernels.data import weight

Tensor: TypeAlias = "torch.Tensor"
Dtype: TypeAlias = "torch.dtype"
Weight: TypeAlias = "weight.Weight"
Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
"""The tensors of a quantised matrix by suffix."""
Parts: TypeAlias = Mapping[str, TensorHeader]
"""What headers say about them."""
Held: TypeAlias = tuple[tuple[int, ...], NumberFormat]
"""The shape of the dense weight, and how it will be held."""

FLOATS_OF_8_BITS = ("F8_E4M3", "F8_E5M2")
POWERS_OF_TWO = ("U8", "F8_E8M0")
"""Dtypes of scales that are exponents with a bias of 127."""
GROUPS = (128, 64, 32, 16)
"""The numbers of columns with a scale that kernels know."""


class ScaledFloat8(NamedTuple):
    """A matrix of 8-bit floats, as for `reexpress.fp8_weight`."""

    values: Tensor
    """[N, K]."""
    scales: Tensor
    block: tuple[int, int] | None
    """Rows and columns with one scale; None: the shape of the scales says it."""
    rounds_rows: bool
    """See `kernels.data.floats.Floats`."""


class Format(Protocol):
    """A way in which quantised matrices lie in a checkpoint. Each is held by tensors of one module, its parts.

    A module whose only tensor of these is a float `weight` is dense: no format is asked about it.
    """

    @property
    def name(self) -> str:
        """The name of the format, as `quantization=` says it: "awq", "gptq", ..."""

    @property
    def suffixes(self) -> frozenset[str]:
        """The last parts of the names of the tensors that make a matrix: {"qweight", "qzeros", "scales"}.

        They may have dots: "weight.absmax", also at the beginning. One that begins with an underscore makes a
        stack of matrices (`StackFormat`): "_blocks" of `experts.gate_up_proj_blocks`, which is a part of
        `experts.gate_up_proj`.
        """

    def check(self, names: Iterable[str]) -> None:
        """Refuse a checkpoint before its tensors are read. names: the names of all tensors.

        Raises:
            ValueError: it holds what is not served; the text names that.
        """

    def stored(self, name: str, tensors: Parts) -> Held:
        """The shape of the dense weight, and how it will be held. name: of the module; tensors: by suffix.

        Raises:
            ValueError: the tensors do not fit each other.
        """

    def weight(self, name: str, tensors: Tensors, dtype: Dtype) -> Weight:
        """The matrix [N, K]. name: of the module; tensors: by suffix; dtype: of the product's inputs and outputs.

        Raises:
            ValueError: the tensors do not fit each other.
        """


@runtime_checkable
class StackFormat(Format, Protocol):
    """A format that also holds stacks of matrices, such as all experts of a layer, in one set of tensors."""

    @property
    def transposed(self) -> bool:
        """True if the dense weight of a stack is [E, K, N]; else it is [E, N, K], as `stored` says it."""

    def stacked(self, name: str, tensors: Tensors, dtype: Dtype) -> Iterator[Weight]:
        """The matrices [N, K] of a stack, one by one. name: of the dense weight; else as `weight`."""


@runtime_checkable
class FloatFormat(Format, Protocol):
    """A format that has matrices of 8-bit floats, which some devices multiply with as they are."""

    def floats(self, name: str, tensors: Tensors) -> ScaledFloat8 | None:
        """The numbers of a matrix and their scales; None if it has other numbers. Arguments as of `weight`.

        Raises:
            ValueError: the tensors do not fit each other.
        """


def parts_by_weight(
    form: Format, tensors: Iterable[TensorHeader]
) -> tuple[list[TensorHeader], dict[str, dict[str, TensorHeader]]]:
    """The tensors that belong to no quantised matrix, and the parts of each of these by the dense weight's name."""
    suffixes = sorted(form.suffixes, key=len, reverse=True)
    plain: list[TensorHeader] = []
    found: dict[str, dict[str, TensorHeader]] = {}
    for tensor in tensors:
        if (split := _split(tensor.name, suffixes)) is None:
            plain.append(tensor)
        else:
            found.setdefault(split[0], {})[split[1]] = tensor
    for weight, parts in list(found.items()):
        if parts.keys() == {"weight"} and parts["weight"].dtype in FLOATS:
            plain.append(found.pop(weight)["weight"])
    return plain, found


def _split(name: str, suffixes: Iterable[str]) -> tuple[str, str] | None:
    """The weight that a tensor is a part of, and the suffix that says which; None if it is no part of any."""
    for suffix in suffixes:
        end = suffix if suffix.startswith(("_", ".")) else f".{suffix}"
        if name.endswith(end):
            owner = name.removesuffix(end)
            return (owner if suffix.startswith("_") else f"{owner}.weight"), suffix
    return None


def wider(num_in: int) -> NumberFormat:
    """What holds any numbers: 8 bits in groups of 32, of 16, or rows of `num_in` columns without groups."""
    return NumberFormat(8, next((group for group in (32, 16) if num_in % group == 0), None))


def grouped(bits: int, num_in: int, group: int, scales: TensorHeader, has_zeros: bool) -> NumberFormat:
    """What holds integers with a scale for each group of columns.

    bits: from 1 to 8. num_in: columns. group: of the checkpoint; has_zeros: they have zeros that are not symmetric.
    """
    whole = group >= num_in
    if not whole and (known := known_group(group, num_in)) is None:
        return wider(num_in)
    size = 4 if has_zeros or scales.dtype == "F32" else 2
    return NumberFormat(width(bits, num_in), None if whole else known, has_zeros, size)


def float_format(name: str, values: TensorHeader, scales: TensorHeader) -> Held:
    """The shape [N, K] of a matrix of 8-bit or 4-bit floats, and how it is held. name: of the module.

    Its dtypes say what it is: values of bytes are two numbers of 4 bits each, NVFP4 if their scales are floats of 8
    bits, MXFP4 if these are powers of two.

    Raises:
        ValueError: it is none of these.
    """
    if len(values.shape) != 2:
        raise ValueError(
            f"{name} is of shape {values.shape}: only matrices are served in 8-bit or 4-bit floats"
        )
    rows, columns = values.shape
    if values.dtype in FLOATS_OF_8_BITS:
        return values.shape, wider(columns)
    group = {"F8_E4M3": 16, **dict.fromkeys(POWERS_OF_TWO, 32)}.get(scales.dtype)
    if values.dtype not in ("U8", "I8") or group is None:
        raise ValueError(
            f"a matrix of {values.dtype} with scales of {scales.dtype} is none of FP8, MXFP8, NVFP4 and MXFP4"
        )
    columns *= 2
    if scales.shape != (rows, columns // group) or columns % group:
        raise ValueError(f"scales {scales.shape} do not fit a matrix {(rows, columns)} in groups of {group}")
    return (rows, columns), NumberFormat(4, group, scale_bytes=4 if group == 16 else 2)


def width(bits: int, num_in: int) -> int:
    """The bits in which integers of `bits` bits are held, exactly; `num_in`: columns."""
    return 4 if bits <= 4 and num_in % 2 == 0 else 6 if bits <= 6 else 8


def known_group(group: int, num_in: int) -> int | None:
    """The largest group that kernels know and that divides a checkpoint's group and a row; None: there is none."""
    return next((known for known in GROUPS if group % known == 0 and num_in % known == 0), None)


def described(tensors: Tensors) -> Parts:
    """What headers would say of tensors, by suffix."""
    names = {f"torch.{name}": code for code, name in DTYPES.items()}
    return {
        suffix: TensorHeader(
            suffix,
            tuple(tensor.shape),
            names.get(str(tensor.dtype), ""),
            tensor.nbytes,
            content=partial(_bytes, tensor),
        )
        for suffix, tensor in tensors.items()
    }


def _bytes(tensor: Tensor) -> bytes:
    import torch

    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())
