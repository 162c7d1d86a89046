"""The weights of a GGUF file under the names of a transformers checkpoint, each in its own type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.gguf.file import BLOCKS, GgufError, TensorInfo, read_gguf
from pagewire.kernels.data import joining
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.kernels.linear import dense
from pagewire.workers.checkpoint.formats.reexpress import reexpressed
from pagewire.workers.checkpoint.gguf.blocks import BLOCK_TYPES, quantised
from pagewire.workers.checkpoint.gguf_names import MODELS, Layout, WeightPlace, joined_shape, places
from pagewire.workers.checkpoint.gguf_table import TiledHeads
from pagewire.workers.checkpoint.source import WeightSource
from pagewire.workers.errors import LoadError

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_BYTES = {name: (values, size) for name, values, size in BLOCKS.values()}
MAX_EXPERTS = 1 << 12
MATRICES = ("heads", "linear heads")
"""Forms of weights of two tensors that are matrices."""
STACKS = ("stack", "transposed stack", "halves", "transposed halves")
"""Forms of weights that have a matrix for each expert."""
STACKED = re.compile(r"(_exps|\.attn_[kv]_b)\.weight$|^altup_(unembd_)?proj\.weight$")


class GgufCheckpoint(WeightSource):
    """The tensors of a GGUF file, or of all parts of a split one, which are mapped and not to be written to.

    A matrix of quantised blocks is a weight of integers (`blocks.py`), unless it is read as floats.
    """

    def __init__(self, path: str | Path, config: Any) -> None:
        """Map the files, and find the weights of a model.

        config: the model's configuration in transformers.

        Raises:
            LoadError: a file is missing or broken, has tensors of types that are not read, or is of another model.
        """
        super().__init__()
        try:
            file = read_gguf(path)
        except GgufError as error:
            raise LoadError(str(error)) from error
        if config.model_type not in MODELS:
            raise LoadError(
                f"{path}: {config.model_type} is not served from GGUF files, but {', '.join(MODELS)}"
            )
        self._tensors = file.tensors
        _check_types(path, file.tensors.values())
        shapes = {name: info.shape for name, info in file.tensors.items()}
        self._values = values = config.to_dict()  # attributes that layers differ in cannot be asked for
        heads = values.get("num_attention_heads", 1)
        kv_heads = values.get("num_key_value_heads") or heads
        try:
            self._places = places(config.model_type, shapes, heads, kv_heads, config.num_hidden_layers)
        except KeyError as error:
            raise LoadError(f"{path} has tensors that {config.model_type} has no use for: {error}") from error
        self._files = {info.path: _mapped(info.path) for info in file.tensors.values()}

    @property
    def names(self) -> Iterable[str]:
        """The names of all weights, as transformers has them."""
        return self._places.keys()

    def on_meta(self, name: str) -> Tensor:
        """The shape of a weight, on the meta device; quantised ones are float32, as which they are read.

        Raises:
            LoadError: a matrix of queries or keys whose rows are not those of the model's heads, or two tensors
                that do not make a weight.
        """
        place = self._places[name]
        info = self._tensors[place.tensor]
        if place.form:
            second = self._tensors[place.other].shape if place.other else None
            try:
                shape = joined_shape(place.form, info.shape, second)
            except ValueError as error:
                raise LoadError(f"{name} of the GGUF file: {error}") from error
            shape = (shape[0], *shape[:0:-1]) if place.form.startswith("transposed") else shape
            return torch.empty(shape, dtype=torch.float32, device="meta")
        shape = info.shape if place.expert is None else info.shape[1:]
        if place.heads and shape[0] % (2 * place.heads):
            raise LoadError(f"{info.name} of the GGUF file has {shape[0]} rows for {place.heads} heads")
        shape = _laid_out(torch.empty(shape, device="meta"), place.layout).shape
        return torch.empty(shape, dtype=FLOATS.get(info.type, torch.float32), device="meta")

    def read(self, name: str) -> Tensor:
        """A weight as floats: quantised ones are float32."""
        place = self._places[name]
        info = self._tensors[place.tensor]
        if self._is_matrix(place):
            return dense(self.weight(name, torch.float32))
        if place.form:
            return self._stack(place)
        if info.type in FLOATS:
            tensor = self._floats(info, place.expert)
            if place.heads:
                tensor = tensor[_order(len(tensor), place.heads)]
            if place.tiled is not None:
                order = self._order_of_values(place.tiled)
                tensor = tensor[:, order] if place.tiled.columns else tensor[order]
        else:
            tensor = dense(self.weight(name, torch.float32))
        if place.plus:
            tensor = tensor.float() - place.plus
        if place.is_decay:
            tensor = torch.log(-tensor.float())
        return _laid_out(tensor, place.layout)

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """A matrix [N, K] in its own scheme; dtype: of the product's inputs and outputs."""
        place = self._places[name]
        info = self._tensors[place.tensor]
        if self._is_matrix(place):
            if place.form == "halves":
                return self._both(place, None, dtype)
            return (self._of_heads if place.form == "heads" else self._of_linear_heads)(place, dtype)
        if info.type in FLOATS:
            return dense_weight(self.read(name), dtype)
        weight = self._matrix(info, place.expert, dtype)
        if place.tiled is not None:
            return self._untiled(weight, place.tiled)
        return weight.take(_order(weight.shape[0], place.heads)) if place.heads else weight

    def _is_matrix(self, place: WeightPlace) -> bool:
        """True for a matrix that two tensors make."""
        return place.form in MATRICES or (
            place.form == "halves" and len(self._tensors[place.tensor].shape) == 2
        )

    def stacked(self, name: str, dtype: torch.dtype, transposed: bool) -> Iterator[Weight]:
        """See `WeightSource.stacked`. The matrices of experts are taken one by one, as they are stored."""
        place = self._places[name]
        if place.form not in STACKS:
            yield from super().stacked(name, dtype, transposed)
            return
        for expert in range(self._tensors[place.tensor].shape[0]):
            yield self._expert(place, expert, dtype)

    def _matrix(self, info: TensorInfo, expert: int | None, dtype: torch.dtype) -> Weight:
        """A matrix [N, K], or one of a stack; of a whole stack, all of them, one below the other."""
        if info.type in FLOATS:
            return dense_weight(self._floats(info, expert).flatten(0, -2), dtype)
        values, size = BLOCK_BYTES[info.type]
        return quantised(self._bytes(info, expert).view(-1, info.shape[-1] // values, size), info.type, dtype)

    def _expert(self, place: WeightPlace, expert: int, dtype: torch.dtype) -> Weight:
        """The matrix [N, K] of an expert; the rows of two tensors take turns, or are halves."""
        if not place.other:
            return self._matrix(self._tensors[place.tensor], expert, dtype)
        both = self._both(place, expert, dtype)
        if place.form.endswith("halves"):
            return both
        return both.take(torch.arange(both.shape[0]).view(2, -1).T.flatten())

    def _both(self, place: WeightPlace, expert: int | None, dtype: torch.dtype) -> Weight:
        """The matrices of two tensors, one below the other: as floats if they are of different types."""
        pair = [self._matrix(self._tensors[name], expert, dtype) for name in (place.tensor, place.other)]
        if pair[0].scheme.name != pair[1].scheme.name:
            pair = [dense_weight(dense(weight)) for weight in pair]
        return Weight.joined(pair)

    def _of_linear_heads(self, place: WeightPlace, dtype: torch.dtype) -> Weight:
        """Queries, keys, values and gates with all rows of a head of keys together.

        Raises:
            LoadError: the tensors have other numbers of rows than the configuration says.
        """
        both = self._both(place, None, dtype)
        heads, size = self._values["linear_num_key_heads"], self._values["linear_key_head_dim"]
        values = self._values["linear_num_value_heads"] * self._values["linear_value_head_dim"]
        parts = [heads * size, heads * size, values, values]
        if sum(parts) != both.shape[0] or values % heads:
            raise LoadError(f"{place.tensor} and {place.other} have {both.shape[0]} rows, not {sum(parts)}")
        rows = [part.view(heads, -1) for part in torch.split(torch.arange(both.shape[0]), parts)]
        return both.take(torch.cat(rows, dim=1).flatten())

    def _order_of_values(self, tiled: TiledHeads) -> Tensor:
        """The index that puts heads of values of linear attention into transformers' order, see `TiledHeads`."""
        keys, heads = self._values["linear_num_key_heads"], self._values["linear_num_value_heads"]
        size = 1 if tiled.single else self._values["linear_value_head_dim"]
        before = 2 * keys * self._values["linear_key_head_dim"] if tiled.after_keys else 0
        order = before + torch.arange(heads * size).view(-1, keys, size).transpose(0, 1).flatten()
        return torch.cat((torch.arange(before), order))

    def _untiled(self, weight: Weight, tiled: TiledHeads) -> Weight:
        """A weight with its heads of values in transformers' order."""
        order = self._order_of_values(tiled)
        if not tiled.columns:
            return weight.take(order)
        size = self._values["linear_value_head_dim"]
        heads = [joining.column_slice(weight, start, start + size) for start in order[::size].tolist()]
        parts = tuple(torch.cat(same, dim=1) for same in zip(*(head.parts for head in heads), strict=True))
        return Weight(heads[0].scheme, parts, weight.shape, weight.dtype)

    def _stack(self, place: WeightPlace) -> Tensor:
        """All experts' matrices as floats, or their biases [E, N]."""
        info = self._tensors[place.tensor]
        if len(info.shape) == 2:
            parts = [self._floats(self._tensors[name], None) for name in (place.tensor, place.other) if name]
            return torch.stack(parts, dim=-1).flatten(1)
        stack = torch.stack([dense(self._expert(place, i, torch.float32)) for i in range(info.shape[0])])
        return stack.transpose(1, 2) if place.form.startswith("transposed") else stack

    def _of_heads(self, place: WeightPlace, dtype: torch.dtype) -> Weight:
        """The matrix [H (D + V), L] of keys [H, L, D] and values [H, V, L]: quantised ones are quantised again."""
        first, second = self._tensors[place.tensor], self._tensors[place.other]
        keys, values = (dense(self._matrix(info, None, torch.float32)) for info in (first, second))
        by_head = torch.cat((keys.view(first.shape).transpose(1, 2), values.view(second.shape)), dim=1)
        matrix = by_head.flatten(0, 1)
        if first.type in FLOATS and second.type in FLOATS:
            return dense_weight(matrix, dtype)
        return reexpressed("keys of all heads", [matrix], dtype)

    def _floats(self, info: TensorInfo, expert: int | None) -> Tensor:
        shape = info.shape if expert is None else info.shape[1:]
        return self._bytes(info, expert).view(FLOATS[info.type]).view(shape)

    def _bytes(self, info: TensorInfo, expert: int | None) -> Tensor:
        """The bytes of a tensor, or of one matrix of a stack."""
        start, size = info.offset, info.num_bytes
        if expert is not None:
            size //= info.shape[0]
            start += expert * size
        return self._noted(self._files[info.path][start : start + size])


def _mapped(path: Path) -> Tensor:
    """A file as bytes uint8, which are read when they are used."""
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise LoadError(f"cannot load {path}: {error}") from error


def _laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor of a GGUF file in the shape that transformers has, as a view."""
    if layout == "row":
        return tensor[None]
    if layout == "middle":
        return tensor[:, None]
    return tensor.flatten() if layout == "flat" else tensor.T if layout == "transposed" else tensor


def _check_types(path: str | Path, tensors: Iterable[TensorInfo]) -> None:
    """Refuse types that are not read, and stacks of the wrong form, before anything is read.

    Raises:
        LoadError: there are some.
    """
    for info in tensors:
        is_vector = len(info.shape) == 1 or info.name.endswith(".bias")
        if info.type not in FLOATS and (info.type not in BLOCK_TYPES or is_vector):
            raise LoadError(
                f"{path}: the tensor {info.name} is of type {info.type}; matrices are read of the types "
                f"{', '.join((*FLOATS, *BLOCK_TYPES))}, vectors of {', '.join(FLOATS)}"
            )
        stacked = STACKED.search(info.name)
        if len(info.shape) != 3 if stacked else len(info.shape) > 2:
            raise LoadError(f"{path}: the tensor {info.name} is of shape {info.shape}")
        if stacked and info.shape[0] > MAX_EXPERTS:
            raise LoadError(f"{path}: {info.name} has {info.shape[0]} experts, of at most {MAX_EXPERTS}")


def _order(num_rows: int, heads: int) -> Tensor:
    """The index that puts rows of `heads` heads into transformers' order.

    llama.cpp's converter puts the two rows of a rotated pair side by side, transformers half a head apart.
    """
    return torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()
