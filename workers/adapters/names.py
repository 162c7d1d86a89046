"""The tensors of an adapter by the module that they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum

from torch import Tensor

from pagewire.ipc.quoting import quoted

PREFIX = "base_model.model."
INNER = re.compile(r"\.(base_layer|modules_to_save|default)(?=\.|$)")
"""Parts of names that PEFT's wrappers of a module add."""
WRAPPED = ".base_layer"
LOW_RANK = re.compile(r"((?:\.base_layer)*)\.lora_[AB](\.default)?\.weight$")
"""The end of a low-rank matrix's name, with its wrappers: a module is wrapped for each adapted parameter."""


class Kind(Enum):
    """What a tensor is to its module; the value is the end of its name."""

    A = "lora_A.weight"
    B = "lora_B.weight"
    B_BIAS = "lora_B.bias"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    WEIGHT = "weight"
    BIAS = "bias"


ENDS = {f".{kind.value}": kind for kind in Kind} | {f".{Kind.MAGNITUDE.value}.weight": Kind.MAGNITUDE}
LONGEST_FIRST = sorted(ENDS, key=len, reverse=True)
Parts = dict[Kind, Tensor]


def by_module(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Parts]:
    """The tensors of each module, by its name in the model of transformers.

    Raises:
        ValueError: a name is of another form, or two are the same, or there is none.
    """
    modules: dict[str, Parts] = {}
    for name, tensor in tensors:
        add_tensor(modules, name, tensor)
    check_any(modules)
    return modules


def add_tensor(modules: dict[str, Parts], name: str, tensor: Tensor) -> None:
    """Add a tensor to those of its module.

    Raises:
        ValueError: its name is of another form, or there is one of its name.
    """
    plain = INNER.sub("", name)
    end = next((end for end in LONGEST_FIRST if plain.endswith(end)), None)
    if end is None or not plain.startswith(PREFIX):
        raise ValueError(f"its tensor {quoted(name)} is not served")
    wrapped = LOW_RANK.search(name)
    module = plain[len(PREFIX) : -len(end)] + ("" if wrapped is None else wrapped[1])
    parts = modules.setdefault(module, {})
    if ENDS[end] in parts:
        raise ValueError(f"its tensor {quoted(name)} stands there twice")
    parts[ENDS[end]] = tensor


def check_any(modules: Mapping[str, Parts]) -> None:
    """Raise ValueError if there are no tensors."""
    if not modules:
        raise ValueError("it holds no tensors")


def kinds_of(parts: Parts) -> str:
    """The kinds of a module's tensors as text, for errors: "lora_A and bias"."""
    return " and ".join(kind.value for kind in parts)
