"""A loaded model as plain values and tensors, and back: the description in a file of packed weights.

Numbers, texts and None stand for themselves. Everything else is a map with one entry, whose name says what it is:
a tensor by its number, a list or a map, a dtype, or one of `FORMS` by its fields. Nothing else can be stored, and
whatever a file says, nothing but these can be made of it. A group of ranks is stored by its name, and is that of
the process that reads.

What runs code of transformers has no form. The rest was proven against it when it was first loaded, by the process
that wrote the file (`network/proof.py`), so running it again needs neither transformers nor the checkpoint.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.ipc.wire.pooling import PoolingInfo
from pagewire.kernels.adapted import Adapted
from pagewire.kernels.cpu import kernels as cpu_kernels
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.linear import PackedLinear
from pagewire.kernels.cpu.quantised import PackedForm, QuantisedLinear
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.latents import LatentHeads
from pagewire.kernels.data.layer import (
    Activation,
    DividedNorm,
    Experts,
    HeadNormForm,
    Indexer,
    InputGate,
    Latents,
    Layer,
    LayerNorm,
    LimitedGate,
    Mixture,
    Norm,
    Router,
    SumTaker,
    Xielu,
)
from pagewire.kernels.data.mixers import (
    Beside,
    Convolution,
    GatedDelta,
    OutputGate,
    SelectiveScan,
    ShortConv,
    StateSpace,
)
from pagewire.kernels.data.paging import LogitTerms
from pagewire.kernels.data.routing import ExpertGroups, Routing
from pagewire.kernels.data.weight import Weight
from pagewire.kernels.output import CappedOutput
from pagewire.kernels.stack import Stack
from pagewire.workers.adapters.embedding import AdaptedEmbedding
from pagewire.workers.caches.kv import KVShape
from pagewire.workers.module.parallel_layers import DividedEmbedding, Gather, GatheredLinear
from pagewire.workers.module.transforms import QuantisedEmbedding, ScaledEmbedding
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.network.model import Model
from pagewire.workers.network.network import Embeddings, KVPlace, LayerInputs, ModuleRows, Network
from pagewire.workers.network.pooler import Dense, Pooler
from pagewire.workers.network.pooling_spec import PoolingSpec, TokenHead
from pagewire.workers.ranks.cut import Axis, Cut
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.ranks.stages import Stage
from pagewire.workers.weight_cache.file import DamagedError, PackedFile, StoredTensor, bytes_of


class NotStoredError(TypeError):
    """An object has no form in a file."""


@dataclass(frozen=True)
class Form:
    """How objects of a type are stored: `make` makes one of the values of these attributes, given by name."""

    attributes: Sequence[str]
    make: Callable[..., Any]


def by_fields(kind: Any) -> Form:
    """The form of a dataclass: the fields that its constructor takes."""
    return Form([field.name for field in dataclasses.fields(kind) if field.init], kind)


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


STORED = (
    Beside,
    CappedOutput,
    Convolution,
    Cut,
    Dense,
    DividedNorm,
    Embeddings,
    ExpertGroups,
    Experts,
    GatedDelta,
    Indexer,
    InputGate,
    Integers,
    KVPlace,
    KVShape,
    LatentHeads,
    Latents,
    Layer,
    LayerInputs,
    LayerNorm,
    LimitedGate,
    LoadedModel,
    LogitTerms,
    Mixture,
    Model,
    ModuleRows,
    Network,
    Norm,
    OutputGate,
    PackedForm,
    Pooler,
    PoolingSpec,
    Router,
    Routing,
    SelectiveScan,
    ShortConv,
    Stage,
    StateSpace,
    SumTaker,
    TokenHead,
    Weight,
    Xielu,
)
"""Dataclasses that are stored by their fields."""
FORMS: dict[type, Form] = {
    **{kind: by_fields(kind) for kind in STORED},
    **{kind: Form(["value"], kind) for kind in (Activation, Axis, HeadNormForm)},
    range: Form(["start", "stop"], lambda start, stop: range(start, stop)),
    torch.device: Form(["type"], torch.device),
    nn.Embedding: Form(["weight"], embedding_of),
    QuantisedEmbedding: Form(["rows"], QuantisedEmbedding),
    ScaledEmbedding: Form(["table", "factor"], ScaledEmbedding),
    DividedEmbedding: Form(["rows", "own", "collective"], DividedEmbedding),
    PackedLinear: Form(
        ["packed", "bias", "out_features", "in_features"],
        lambda packed, bias, out_features, in_features: PackedLinear.of_packed(
            *cpu().packing, packed, bias, (out_features, in_features)
        ),
    ),
    QuantisedLinear: Form(
        ["packed", "form", "bias"],
        lambda packed, form, bias: QuantisedLinear.of_packed(*cpu().packing, packed, form, bias),
    ),
    GatheredLinear: Form(["linear", "gather"], GatheredLinear),
    Gather: Form(["spans", "collective"], Gather),
    Stack: Form(["input_norm", "layers", "norm_first"], Stack),
    PoolingInfo: Form(PoolingInfo.__struct_fields__, PoolingInfo),
}
"""A linear layer or a scheme of another type is stored once it has an entry here."""
BY_NAME = {kind.__name__: form for kind, form in FORMS.items()}
ADAPTED = {Adapted: "linear", AdaptedEmbedding: "embedding"}
"""What adapters change, which is stored without them, by the attribute that holds it."""
Ranks = Mapping[str, Collective]
"""The groups of ranks that a model names: `all`, and `shards`, which divide its layers."""


def describe(value: Any, tensors: list[Tensor], everyone: Collective) -> Any:
    """The description of an object; its tensors are appended to `tensors`.

    everyone: all ranks of the group; another group is that of the ranks which divide its layers.

    Raises:
        NotStoredError: something in it has no form.
    """
    if isinstance(value, Enum) or not (value is None or isinstance(value, bool | int | float | str)):
        return _marked(value, tensors, everyone)
    return value


def _marked(value: Any, tensors: list[Tensor], everyone: Collective) -> dict[str, Any]:
    while (held := ADAPTED.get(type(value))) is not None:
        value = getattr(value, held)
    if isinstance(value, Tensor):
        tensors.append(value.detach().contiguous())
        return {"tensor": len(tensors) - 1}
    if type(value) in (list, tuple):  # a named tuple needs a form of its own
        return {type(value).__name__: [describe(item, tensors, everyone) for item in value]}
    if isinstance(value, dict):
        return {"dict": {name: describe(item, tensors, everyone) for name, item in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if hasattr(value, "all_reduce"):
        return {"ranks": "all" if value is everyone else "shards"}
    if (form := FORMS.get(type(value))) is None:
        raise NotStoredError(f"a {type(value).__name__} has no form in a file of packed weights")
    fields = {name: describe(getattr(value, name), tensors, everyone) for name in form.attributes}
    return {type(value).__name__: fields}


def restored(description: Any, tensors: Sequence[Tensor], ranks: Ranks) -> Any:
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
        items = [restored(item, tensors, ranks) for item in value]
        return items if name == "list" else tuple(items)
    if name == "dict":
        return {key: restored(item, tensors, ranks) for key, item in value.items()}
    if name == "dtype":
        return dtype_named(value)
    if name == "ranks":
        return ranks[value]
    return BY_NAME[name].make(**{field: restored(item, tensors, ranks) for field, item in value.items()})


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
