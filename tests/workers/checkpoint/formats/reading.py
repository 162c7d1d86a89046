"""Reads a matrix as a checkpoint's reader does: names, shapes, then the tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pagewire.kernels.cpu.quantised import PackedForm
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.weight import Weight
from pagewire.workers.checkpoint.formats.format import Format, described
from tests.workers.checkpoint.formats.rounding import Rounded, RoundedFloats

NAME = "model.layers.0.self_attn.q_proj"


def matrix(rows: int = 64, columns: int = 256, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def read(form: Format, tensors: Mapping[str, Tensor], name: str = NAME) -> Weight:
    """The weight of a module's tensors; its shape, and how it is held, are known without them."""
    assert tensors.keys() <= form.suffixes
    form.check([f"{name}.{suffix}" for suffix in tensors])
    shape, held = form.stored(name, described(tensors))
    weight = form.weight(name, tensors, torch.float32)
    assert weight.shape == shape
    if isinstance(weight.scheme, Integers) and not tensors.keys() & {"g_idx", "weight_g_idx"}:
        assert held == PackedForm.of(weight).stored
    return weight


def is_told(form: Format, tensors: Mapping[str, Tensor], weight: Weight) -> bool:
    """Whether headers tell a weight's shape, and how its integers are held."""
    return form.stored(NAME, described(tensors)) == (weight.shape, PackedForm.of(weight).stored)


def shape_of(form: Format, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape of a weight by what headers say of its tensors."""
    return form.stored(name, described(tensors))[0]


def assert_exact(weight: Weight, original: Rounded | RoundedFloats) -> None:
    assert torch.equal(weight.dense().double(), original.dense().double())


def assert_near(weight: Weight, original: Rounded | RoundedFloats) -> None:
    dense = original.dense()
    assert (weight.dense() - dense).norm() / dense.norm() < 0.01


def scheme(weight: Weight) -> Integers:
    assert isinstance(weight.scheme, Integers)
    return weight.scheme
