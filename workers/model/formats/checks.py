"""Which tensors a module of a quantised checkpoint has, and whether they are of the right shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pagewire.kernels.integers import SCALE_DTYPES
from pagewire.workers.errors import LoadError


def parts_by_module(names: Iterable[str], suffixes: Iterable[str]) -> dict[str, set[str]]:
    """For each module with tensors of such suffixes: which of them it has. names: of tensors."""
    found: dict[str, set[str]] = {}
    wanted = set(suffixes)
    for name in names:
        module, _, suffix = name.rpartition(".")
        if suffix in wanted:
            found.setdefault(module, set()).add(suffix)
    return found


def check_complete(names: Iterable[str], needed: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise LoadError if a module has some of the needed tensors (or an optional one), and lacks others."""
    needed = set(needed)
    for module, has in parts_by_module(names, needed | set(optional)).items():
        if missing := sorted(needed - has):
            raise LoadError(f"{module} has {_list(has)}, but no {_list(missing)}")


def need(name: str, tensors: Mapping[str, Tensor], suffix: str, *dtypes: torch.dtype) -> Tensor:
    """A tensor of a module, a matrix of one of these dtypes.

    Raises:
        LoadError: it is missing, or anything else.
    """
    if (tensor := tensors.get(suffix)) is None:
        raise LoadError(f"{name}.{suffix} is missing")
    if tensor.dtype not in dtypes or tensor.dim() != 2:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise LoadError(
            f"{name}.{suffix} must be a matrix of {kinds}, not {tuple(tensor.shape)} of {tensor.dtype}"
        )
    return tensor


def need_scales(name: str, tensors: Mapping[str, Tensor], suffix: str, shape: tuple[int, int]) -> Tensor:
    """The scales of a module, float16, bfloat16 or float32 of a shape.

    Raises:
        LoadError: they are missing, or anything else.
    """
    scales = need(name, tensors, suffix, *SCALE_DTYPES)
    check_shape(name, suffix, scales, shape)
    return scales


def check_shape(name: str, suffix: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise LoadError if a tensor of a module is of another shape."""
    if tuple(tensor.shape) != shape:
        raise LoadError(f"{name}.{suffix} must have the shape {shape}, not {tuple(tensor.shape)}")


def check_divides(name: str, what: str, size: int, step: int) -> None:
    """Raise LoadError if a size is 0 or no multiple of a step."""
    if size <= 0 or size % step:
        raise LoadError(f"{name} has {size} {what}; they must be a multiple of {step}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
