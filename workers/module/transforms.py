"""Transforms of a loaded module: each replaces some of its parts by faster ones with the same result."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.data.joining import joined
from pagewire.kernels.data.reduced import Reduced
from pagewire.kernels.data.weight import DENSE, dense_weight
from pagewire.kernels.dispatch import as_they_are
from pagewire.kernels.linear import Linear, Weight, dense
from pagewire.kernels.ops import rms_norm
from pagewire.workers.errors import LoadError
from pagewire.workers.module.matrices import is_linear, is_plain_embedding
from pagewire.workers.module.parallel_layers import (
    DividedEmbedding,
    Gather,
    GatheredLinear,
    divided_embedding,
)
from pagewire.workers.module.products import packed
from pagewire.workers.module.weights import Weights
from pagewire.workers.ranks.cut import Axis
from pagewire.workers.step.context import step_axes
from pagewire.workers.versions import rotary_positions

ORIGINAL_LENGTH = "original_max_position_embeddings"


class LinearModule(nn.Module):
    """A linear layer that runs by our kernels, in place of PyTorch's."""

    def __init__(self, product: Linear) -> None:
        super().__init__()
        self.product = product
        self.out_features, self.in_features = product.out_features, product.in_features
        # Some modules read shape and dtype of their linears' weights.
        self.weight = torch.empty(self.out_features, self.in_features, dtype=product.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features]."""
        with as_they_are():
            return self.product(x)


def pack_linears(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Replace every linear layer, and GPT-2's transposed `Conv1D`, by a `LinearModule` on a device."""
    for name, child in list(module.named_children()):
        if is_linear(child):
            setattr(module, name, LinearModule(pack_joined([child], weights, device)))
        else:
            pack_linears(child, weights, device)


def pack_joined(
    linears: Sequence[nn.Module],
    weights: Weights,
    device: torch.device,
    order: Tensor | None = None,
    factors: Mapping[Any, float | Tensor] | None = None,
    own_biases: Mapping[Any, Tensor] | None = None,
) -> Linear:
    """One linear layer on a device in place of several with the same input; a bias that one lacks is 0.

    order: int64 [rows], of this rank's rows of all of them, one below the other, those that the result has; None:
    they stay as they are.
    factors: what some of the layers, whose weights are dense, give is multiplied by these, which may be [N]. Their
    products are rounded once more.
    own_biases: [N] of layers that have none themselves.

    Where weights are divided over several ranks, it is this rank's part: its outputs, or the sum over the ranks.
    """
    given = own_biases or {}
    biases = [given.get(linear, weights.part(linear, "bias")) for linear in linears]
    matrices = [weights.matrix(linear) for linear in linears]
    for place, linear in enumerate(linears):
        if factors and (factor := factors.get(linear)) is not None:
            whole, own, by = matrices[place], biases[place], torch.as_tensor(factor, dtype=torch.float32)
            matrices[place] = dense_weight((whole.dense().float() * by.view(-1, 1)).to(whole.dtype))
            biases[place] = None if own is None else (own.float() * by).to(own.dtype)
    matrix = joined(matrices)
    weights.note_joining(matrices, matrix)
    bias = None
    if any(own is not None for own in biases):
        pairs = zip(matrices, biases, strict=True)
        bias = torch.cat([torch.zeros(m.shape[0], dtype=m.dtype) if own is None else own for m, own in pairs])
    if order is not None:
        matrix, bias = matrix.take(order), None if bias is None else bias[order]
    product = packed(matrix, bias, device)
    weights.let_go()
    return over_ranks(product, linears[0], weights)


def over_ranks(product: Linear, linear: nn.Module, weights: Weights) -> Linear:
    """A product that adds up over the ranks if its inputs are divided, and gathers logits from them."""
    shards, cut = weights.shards, weights.cut(linear)
    if shards is None or cut is None:
        return product
    if cut.axis is Axis.COLUMNS:
        return Reduced(product, shards.collective)
    if linear is shards.output:
        return GatheredLinear(product, Gather(cut.places, shards.collective))
    return product


class QuantisedEmbedding(nn.Module):
    """An embedding that keeps its rows quantised, and dequantises those that are looked up."""

    def __init__(self, rows: Weight) -> None:
        super().__init__()
        self.scheme, self.shape, self.dtype = rows.scheme, rows.shape, rows.dtype
        self.num_embeddings, self.embedding_dim = rows.shape
        self.num_parts = len(rows.parts)
        for index, part in enumerate(rows.parts):
            self.register_buffer(f"part{index}", part)

    @property
    def rows(self) -> Weight:
        """The rows [V, H] as they are held."""
        parts = tuple(self.get_buffer(f"part{index}") for index in range(self.num_parts))
        return Weight(self.scheme, parts, self.shape, self.dtype)

    @property
    def weight(self) -> Tensor:
        """The first part of the rows: Llama 4 asks for its device."""
        return self.get_buffer("part0")

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.num_bytes

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids int64 [...] to embeddings [..., H]."""
        return dense(self.rows.take(ids.flatten())).view(*ids.shape, self.embedding_dim)


class ScaledEmbedding(nn.Module):
    """An embedding whose rows are multiplied by a factor when they are looked up (Gemma 3)."""

    def __init__(self, table: nn.Module, factor: float) -> None:
        super().__init__()
        self.table = table
        self.factor: float = factor

    @property
    def weight(self) -> Tensor:
        """That of the table."""
        return self.table.weight  # type: ignore[return-value]

    @property
    def embedding_dim(self) -> int:
        """Numbers of an embedding."""
        return self.table.embedding_dim  # type: ignore[return-value]

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids int64 [...] to embeddings [..., H]."""
        return self.table(ids) * self.factor  # type: ignore[no-any-return]


def embedding(module: nn.Module, weights: Weights, device: torch.device) -> nn.Module:
    """An embedding with its weights, or this rank's part: itself, or on a CPU one over rows that stay quantised."""
    rows, shards, cut = weights.matrix(module), weights.shards, weights.cut(module)
    plain = rows.scheme is DENSE or device.type != "cpu"
    if shards is None or cut is None:
        if not plain:
            return QuantisedEmbedding(rows)
        weights.fill(module)
        return module
    if plain:
        return divided_embedding(module, rows.dense(), cut, shards.collective)
    return DividedEmbedding(QuantisedEmbedding(rows), cut.own[0], shards.collective)


def pack_embeddings(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Replace plain embeddings whose weights are quantised, so that they stay so, and those that are divided."""
    for name, child in list(module.named_children()):
        if is_plain_embedding(child) or (isinstance(child, nn.Embedding) and weights.cut(child) is not None):
            setattr(module, name, embedding(child, weights, device))
        else:
            pack_embeddings(child, weights, device)


class RMSNorm(nn.Module):
    """RMSNorm by our kernel, x / rms(x) * (weight + offset); offset 1 is Gemma's form."""

    def __init__(self, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(weight.detach(), requires_grad=False), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last axis."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


def norm_kernel(module: nn.Module) -> RMSNorm | None:
    """An `RMSNorm` equal to `module` on random input; None if `module` is no RMSNorm of a known form."""
    weight = getattr(module, "weight", None)
    eps = next((e for n in ("variance_epsilon", "eps", "norm_eps") if (e := getattr(module, n, None))), None)
    if "RMSNorm" not in type(module).__name__ or weight is None or weight.dim() != 1 or eps is None:
        return None
    if len(list(module.parameters())) != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a gate as well
        return None
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected = module(x)
    for offset in (0.0, 1.0):
        kernel = RMSNorm(weight, eps, offset)
        if expected.dtype == x.dtype and torch.allclose(
            kernel(x), expected, rtol=tolerance(x.dtype), atol=1e-6
        ):
            return kernel
    return None


def replace_norms(module: nn.Module) -> None:
    """Replace RMSNorm modules by `RMSNorm`, if that computes the same."""
    for name, child in list(module.named_children()):
        if (kernel := norm_kernel(child)) is not None:
            setattr(module, name, kernel)
        else:
            replace_norms(child)


class RotaryTable(nn.Module):
    """A rotary module's outputs for all positions, computed once.

    So the angles of a position never depend on the batch: neither on its size nor, in models that scale frequencies
    for long sequences, on the longest sequence in it. Such a model has two tables, one behind the other: of
    sequences of up to `short_length` tokens, and of longer ones (`angle_rows`).
    """

    def __init__(self, rotary: nn.Module, num_positions: int, short_length: int = 0) -> None:
        """short_length: see `short_length` below, for as many positions."""
        super().__init__()
        self.rotary, self.short_length = rotary, short_length
        self.positions = torch.arange(num_positions)[None]
        self.tables: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the rotary module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("rotary"), name)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The rotary module's output for position_ids [1, T], which are rows of the table: tensors [1, T, ...].

        Position_ids may be [3, 1, T], of time, height and width, which for text are all the same.
        """
        if (axes := step_axes()) is not None:
            return tuple(axes.rows(part[0])[None] for part in self.table(x, *args, **kwargs))
        table = self.table(x, *args, **kwargs)
        index = position_ids.flatten()[: position_ids.shape[-1]]
        if isinstance(table, Tensor):
            return table[:, index]
        return tuple(part[:, index] for part in table)

    def table(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The rotary module's output for all positions and hidden states like x [1, T, H]."""
        key = (x.device, x.dtype, args, *kwargs.items())
        if (table := self.tables.get(key)) is None:
            # The module remembers the longest sequence until it gets a short one.
            lengths = (1, self.short_length, self.positions.shape[1]) if self.short_length else (None,)
            positions = rotary_positions(self.rotary, self.positions.to(x.device))
            parts = [self.rotary(x[:, :1], positions[..., :length], *args, **kwargs) for length in lengths]
            self.tables[key] = table = _one_after_the_other(parts[-2:])
        return table


def _one_after_the_other(tables: Sequence[Any]) -> Any:
    """Tables [1, n, ...] as one, or tuples of tables as a tuple."""
    if len(tables) == 1 or isinstance(tables[0], Tensor):
        return tables[0] if len(tables) == 1 else torch.cat(list(tables), 1)
    return tuple(torch.cat(parts, 1) for parts in zip(*tables, strict=True))


def _rotary_modules(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """The rotary modules with a forward(x, position_ids) within a module, each after its parent and its name."""
    for name, child in list(module.named_children()):
        if "RotaryEmbedding" not in type(child).__name__:
            yield from _rotary_modules(child)
        elif list(inspect.signature(type(child).forward).parameters)[1:3] == ["x", "position_ids"]:
            yield module, name, child


def tabulate_rotary(module: nn.Module, num_positions: int, short_length: int = 0) -> None:
    """Replace rotary modules by tables. short_length: see `RotaryTable`."""
    for parent, name, rotary in _rotary_modules(module):
        setattr(parent, name, RotaryTable(rotary, num_positions, short_length))


def short_length(module: nn.Module, num_positions: int) -> int:
    """The most tokens of a sequence whose angles are those of short ones; 0 if all have the same angles.

    num_positions: of the longest sequence.

    transformers computes a forward of more tokens than the model was trained with by other frequencies: by those
    of "longrope", which two lists scale, or of "dynamic" NTK, for which the longest sequence decides here.

    Raises:
        LoadError: layers change their angles at different lengths.
    """
    found = set()
    for _, _, rotary in _rotary_modules(module):
        kinds = getattr(rotary, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            settings = getattr(rotary.config, "rope_parameters", None) or {}
            if kind == "longrope":
                found.add((settings[layer_type] if layer_type else settings)[ORIGINAL_LENGTH])
            elif kind == "dynamic":
                found.add(rotary.original_max_seq_len)
    lengths = {length for length in found if length < num_positions}
    if len(lengths) > 1:
        raise LoadError(
            f"its rotary angles change at several lengths: {', '.join(map(str, sorted(lengths)))}"
        )
    return int(lengths.pop()) if lengths else 0


def tolerance(dtype: torch.dtype) -> float:
    """Permitted relative difference between two correct computations in this dtype."""
    return {torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 4e-2)
