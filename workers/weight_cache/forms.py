"""The objects of a model as plain values and tensors, and back: the description in a file of packed weights.

Numbers, texts and None stand for themselves. Everything else is a map with one entry, whose name says what it is:
a tensor by its number, a list or a map, a dtype, or one of `FORMS` by its fields. Nothing else can be stored, and
whatever a file says, nothing but these can be made of it.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.linear import PackedLinear
from pagewire.kernels.cpu.quantised import PackedForm, QuantisedLinear
from pagewire.kernels.integers import Integers
from pagewire.kernels.layer import Activation, Experts, Layer, LayerNorm, Mixture, Norm, Router
from pagewire.kernels.paging import LogitTerms
from pagewire.kernels.weight import Weight
from pagewire.workers.model.attention import KVShape
from pagewire.workers.model.transforms import QuantisedEmbedding
from pagewire.workers.weight_cache.file import DamagedError, PackedFile, StoredTensor, bytes_of


class NotStoredError(TypeError):
    """An object has no form in a file."""


@dataclass(frozen=True)
class Form:
    """How objects of a type are stored: as fields, of which `make` makes an object again."""

    fields: Callable[[Any], dict[str, Any]]
    make: Callable[..., Any]


def fields_of(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def packed_fields(linear: PackedLinear) -> dict[str, Any]:
    """What a packed linear layer is made of."""
    return {
        "packed": linear.packed,
        "bias": linear.bias,
        "shape": (linear.out_features, linear.in_features),
    }


def packed_linear(packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> PackedLinear:
    """A packed linear layer, by the kernels of this process.

    Raises:
        ValueError: there are none, or the parts do not fit each other.
    """
    return cpu().packed_linear(packed, bias, shape)


def quantised_fields(linear: QuantisedLinear) -> dict[str, Any]:
    """What a packed quantised linear layer is made of."""
    return {"packed": linear.packed, "form": linear.form, "bias": linear.bias}


def quantised_linear(packed: Tensor, form: PackedForm, bias: Tensor | None) -> QuantisedLinear:
    """A packed quantised linear layer; raises as `packed_linear`."""
    return cpu().quantised_linear(packed, form, bias)


def cpu() -> CpuKernels:
    """The compiled kernels of this process.

    Raises:
        ValueError: there are none.
    """
    if (kernels := cpu_kernels.load()) is None:
        raise ValueError("there are no compiled kernels")
    return kernels


def embedding_of(weight: Tensor) -> nn.Embedding:
    """The embedding whose rows [V, H] these are."""
    num_rows, size = weight.shape
    return nn.Embedding(num_rows, size, _weight=weight, _freeze=True)


STORED = (Layer, LogitTerms, Mixture, Router, Experts, Norm, LayerNorm, KVShape, Weight, Integers, PackedForm)
"""Dataclasses that are stored by their fields."""
FORMS: dict[type, Form] = {
    **{kind: Form(fields_of, kind) for kind in STORED},
    nn.Embedding: Form(lambda embedding: {"weight": embedding.weight}, embedding_of),
    Activation: Form(lambda activation: {"value": activation.value}, Activation),
    QuantisedEmbedding: Form(lambda embedding: {"rows": embedding.rows}, QuantisedEmbedding),
    PackedLinear: Form(packed_fields, packed_linear),
    QuantisedLinear: Form(quantised_fields, quantised_linear),
}
"""A linear layer or a scheme of another type is stored once it has an entry here."""

BY_NAME = {kind.__name__: form for kind, form in FORMS.items()}


def add_form(kind: type) -> None:
    """Let dataclasses of this type be stored."""
    FORMS[kind] = BY_NAME[kind.__name__] = Form(fields_of, kind)


def describe(value: Any, tensors: list[Tensor]) -> Any:
    """The description of an object; its tensors are appended to `tensors`.

    Raises:
        NotStoredError: something in it has no form.
    """
    if isinstance(value, Enum) or not (value is None or isinstance(value, bool | int | float | str)):
        return _marked(value, tensors)
    return value


def _marked(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        tensors.append(value.detach().contiguous())
        return {"tensor": len(tensors) - 1}
    if type(value) in (list, tuple):  # a named tuple needs a form of its own
        return {type(value).__name__: [describe(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": {name: describe(item, tensors) for name, item in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if (form := FORMS.get(type(value))) is None:
        raise NotStoredError(f"a {type(value).__name__} has no form in a file of packed weights")
    fields = {name: describe(field, tensors) for name, field in form.fields(value).items()}
    return {type(value).__name__: fields}


def restored(description: Any, tensors: Sequence[Tensor]) -> Any:
    """The object of a description.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is none that `describe` makes.
    """
    if not isinstance(description, dict):
        return description
    ((name, value),) = description.items()
    if name == "tensor":
        return tensors[value]
    if name in ("list", "tuple"):
        items = [restored(item, tensors) for item in value]
        return items if name == "list" else tuple(items)
    if name == "dict":
        return {key: restored(item, tensors) for key, item in value.items()}
    if name == "dtype":
        return dtype_named(value)
    return BY_NAME[name].make(**{field: restored(item, tensors) for field, item in value.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        DamagedError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"{name!r} is no dtype")
    return dtype


def stored(tensor: Tensor) -> StoredTensor:
    """A contiguous tensor on the CPU as a file takes it. Its memory must live as long as the result."""
    data = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return StoredTensor(dtype_name(tensor.dtype), list(tensor.shape), memoryview(data).cast("B"))


def tensors_of(file: PackedFile) -> list[Tensor]:
    """The tensors of a file, over its content, which lives as long as any of them.

    Raises:
        DamagedError: the header does not describe the content.
    """
    tensors = []
    for place in file.header.tensors:
        dtype = dtype_named(place.dtype)
        start, size = bytes_of(place, dtype.itemsize, file.content)
        data = torch.frombuffer(file.content.memory, dtype=torch.uint8, count=size, offset=start)
        tensors.append(data.view(dtype).view(place.shape))
    return tensors
