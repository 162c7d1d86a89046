"""Which matrices a checkpoint holds, by its headers: the part of the model, the dense shape, how they will be held.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from pagewire.ipc.families.family import ForeignModel
from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.workers.checkpoint.formats.format import parts_by_weight
from pagewire.workers.checkpoint.gguf_names import BLOCKS
from pagewire.workers.checkpoint.headers import FLOATS, TensorHeader


class Part(str, Enum):
    """A part of a model."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    EXPERTS = "experts"
    OUTPUT = "output"
    NORMS = "norms"
    OTHER = "other"


HEADS = (".lm_head.", ".embed_out.", ".output_projection.", ".output.", ".language_model.lm_head.")
"""How the names of output layers begin."""
WORDS = {
    Part.EXPERTS: (
        ".experts.",
        *("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
        *(".moe.gate_proj.", ".moe.up_proj.", ".moe.down_proj."),
    ),
    Part.ATTENTION: (
        "attn",
        "attention",
        ".wq.",
        ".wk.",
        ".wv.",
        ".wo.",
        ".q_proj.",
        ".k_proj.",
        ".v_proj.",
        ".o_proj.",
        ".qkv_proj.",
    ),
    Part.FEED_FORWARD: (
        "mlp",
        "ffn",
        "feed_forward",
        "moe",
        "shared_expert",
        "router",
        ".fc1.",
        ".fc2.",
        ".c_fc.",
        ".w1.",
        ".w2.",
        ".w3.",
    ),
    Part.EMBEDDING: ("embed", ".wte.", ".wpe.", ".w.weight."),
}
"""What stands in the names of a part's tensors, between dots; the first part that fits counts."""
BESIDE_TEXT = (
    ".vision",
    ".visual",
    ".image",
    ".video",
    ".audio",
    ".multi_modal",
    ".mm_projector",
    ".projector",
    ".connector",
    ".aligner",
    ".merger",
    ".patch_merge",
    ".vit_",
    ".vqmodel",
    ".embed_vision",
    ".embed_audio",
    ".generation_",
)
"""How the names begin of modules that a model needs for pictures and sound only."""


def part_of(name: str) -> Part:
    """The part of the model that a tensor belongs to."""
    name = f".{name}."
    if name.startswith(HEADS):
        return Part.OUTPUT
    module, _, leaf = name[:-1].rpartition(".")
    last = module.rpartition(".")[2]
    if leaf in ("weight", "bias") and ("norm" in last or "ln" in last):
        return Part.NORMS
    return next((part for part, words in WORDS.items() if any(word in name for word in words)), Part.OTHER)


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` matrices [rows, columns] of one kind; numbers that no product reads are `rows`, with one column."""

    name: str
    part: Part
    rows: int
    columns: int
    stored: NumberFormat
    num_bytes: int
    """In the file, with scales and offsets."""
    dtype: str = ""
    """In the file, by its own name; empty if several tensors make the matrix."""
    count: int = 1
    is_vector: bool = False
    """True for numbers that are used as they are, such as the weights of norms."""

    @classmethod
    def of(
        cls, name: str, shape: tuple[int, ...], stored: NumberFormat, num_bytes: int, dtype: str = ""
    ) -> Matrix:
        """The matrix of a weight [N, K], those of experts [E, N, K], or other numbers."""
        part, num_weights = part_of(name), math.prod(shape)
        if len(shape) == 2 or (len(shape) == 3 and part is Part.EXPERTS):
            *counts, rows, columns = shape
            return cls(name, part, rows, columns, stored, num_bytes, dtype, math.prod(counts))
        return cls(name, part, num_weights, 1, stored, num_bytes, dtype, is_vector=True)

    @property
    def num_weights(self) -> int:
        """The number of weights, scales not counted."""
        return self.count * self.rows * self.columns


def matrices(
    tensors: Iterable[TensorHeader], config: Mapping[str, Any], foreign: ForeignModel | None = None
) -> Iterator[Matrix]:
    """The matrices and vectors of a checkpoint. Of a quantised one, several tensors make one.

    Those that only pictures or sound need are left out, for they are not loaded.

    config: the model's configuration, whose `quantization_config` names the format. foreign: of a family with names
    of its own, under whose module's names they come.

    Raises:
        ValueError, KeyError, ...: as `format_of` and `Format.stored`.
    """
    found = _in_files(tensors, config)
    if foreign is None:
        yield from found
        return
    held = {matrix.name: matrix for matrix in found}
    for name, excerpt in foreign.excerpts(held).items():
        whole = held[excerpt.tensor]
        rows = whole.rows if excerpt.num_rows is None else excerpt.num_rows
        size = whole.num_bytes * rows // max(1, whole.rows)
        yield replace(whole, name=name, part=part_of(name), rows=rows, num_bytes=size)


def _in_files(tensors: Iterable[TensorHeader], config: Mapping[str, Any]) -> Iterator[Matrix]:
    """See `matrices`, under the names in the files."""
    if text := config.get("text_config"):
        layers = [f".layers.{layer}." for layer in text.get("cross_attention_layers") or ()]
        beside = (*BESIDE_TEXT, *layers)
        tensors = [x for x in tensors if not any(word in f".{x.name}" for word in beside)]
    if settings := config.get("quantization_config"):
        from pagewire.workers.checkpoint.formats.registry import format_of  # which knows all formats

        form = format_of(settings)
        tensors, quantised = parts_by_weight(form, tensors)
        for name, parts in quantised.items():
            shape, stored = form.stored(name.removesuffix(".weight"), parts)
            if len(shape) == 3 and getattr(form, "transposed", False):
                shape = shape[0], shape[2], shape[1]
            yield Matrix.of(name, shape, stored, sum(part.num_bytes for part in parts.values()))
    for tensor in tensors:
        yield Matrix.of(tensor.name, tensor.shape, held_as(tensor), tensor.num_bytes, tensor.dtype)


def held_as(tensor: TensorHeader) -> NumberFormat:
    """How a tensor is held that is a weight of its own: as floats, or as GGUF's blocks."""
    if tensor.dtype in BLOCKS:
        bits, group, zero = BLOCKS[tensor.dtype]
        return NumberFormat(bits, group, has_offsets=not zero)
    return NumberFormat(FLOATS.get(tensor.dtype) or 8 * tensor.num_bytes // max(1, math.prod(tensor.shape)))
