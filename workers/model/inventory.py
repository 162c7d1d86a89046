"""Which matrices a checkpoint holds, by its headers: the part of the model, the dense shape, the bits of a number.

Imports no torch. What cannot be told from a header, such as the exact group of some formats, is estimated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pagewire.kernels.cpu.panels import Stored
from pagewire.workers.model.headers import TensorHeader

FLOAT_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16}


GGUF_FORMS = {  # of its types, as `Stored`: bits, columns of a scale, whether there are offsets
    "Q8_0": (8, 32, False),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q2_K": (4, 16, True),
    "Q3_K": (4, 16, False),
    "Q4_K": (4, 32, True),
    "Q5_K": (8, 32, True),
    "Q6_K": (8, 16, False),
    "IQ4_NL": (4, 32, False),
    "IQ4_XS": (4, 32, False),
    "MXFP4": (4, 32, False),
}


class Part(str, Enum):
    """A part of a model."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    EXPERTS = "experts"
    OUTPUT = "output"
    NORMS = "norms"
    OTHER = "other"


# The first pattern that is found in a tensor's name tells its part.
PATTERNS: tuple[tuple[Part, re.Pattern[str]], ...] = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        (Part.OUTPUT, r"^(lm_head|embed_out|output_projection|output)\."),
        (Part.NORMS, r"(norm|ln_?\d?_?[a-z]*|layernorm)\w*\.(weight|bias)$"),
        (Part.EXPERTS, r"(^|\.)experts(\.|$)|block_sparse_moe\.(input|output)_linear"),
        (Part.ATTENTION, r"attn|attention|(^|\.)(wq|wk|wv|wo|[qkvo]_proj|qkv_proj)\."),
        (Part.FEED_FORWARD, r"mlp|ffn|feed_forward|moe|shared_expert|router|(^|\.)(fc\d|c_fc|w[123])\."),
        (Part.EMBEDDING, r"embed|(^|\.)(wte|wpe|w)\.weight$"),
    )
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` matrices [rows, columns] of one kind; the numbers of a vector are `rows`, with one column."""

    name: str
    part: Part
    rows: int
    columns: int
    stored: Stored
    num_bytes: int
    """In the file, with scales and offsets."""
    dtype: str = ""
    """In the file, by its own name, if they are floats."""
    count: int = 1
    is_vector: bool = False

    @property
    def num_weights(self) -> int:
        """The number of weights, scales not counted."""
        return self.count * self.rows * self.columns


def part_of(name: str) -> Part:
    """The part of the model that a tensor belongs to."""
    return next((part for part, pattern in PATTERNS if pattern.search(name)), Part.OTHER)


def matrices(tensors: Iterable[TensorHeader], config: Mapping[str, Any]) -> Iterator[Matrix]:
    """The matrices and vectors of a checkpoint, in the order of its tensors. Quantised ones count once.

    config: the model's configuration, whose `quantization_config` says how numbers are packed.
    """
    modules: dict[str, dict[str, TensorHeader]] = {}
    for tensor in tensors:
        module, suffix = _split(tensor.name)
        modules.setdefault(module, {})[suffix] = tensor
    quantization = config.get("quantization_config") or {}
    for module, parts in modules.items():
        if (matrix := quantised(module, parts, quantization, config)) is not None:
            yield matrix
            parts = {suffix: tensor for suffix, tensor in parts.items() if suffix == "bias"}
        for tensor in parts.values():
            yield plain(tensor)


QUANTISED = re.compile(
    r"(?P<module>.+)[._](?P<suffix>qweight|qzeros|scales|g_idx|blocks|weight_packed|weight_shape|weight_zero_point"
    r"|weight_scale|weight_scale_inv|weight_global_scale|weight_g_idx|input_scale|input_zero_point|act_scale"
    r"|SCB|weight_format|lookup_table|codes|codebooks"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))$"
)


def _split(name: str) -> tuple[str, str]:
    """A tensor's module and the rest of its name: "weight", "bias", or one of the tensors of a quantised matrix."""
    if found := QUANTISED.fullmatch(name):
        return found["module"], found["suffix"]
    module, _, suffix = name.rpartition(".")
    return (module, suffix) if suffix in ("weight", "bias") else (name, "weight")


def plain(tensor: TensorHeader) -> Matrix:
    """A tensor of its own: a vector, a matrix [N, K], several [E, N, K], or a matrix of GGUF's blocks."""
    *counts, rows, columns = (1, 1, *tensor.shape)[-3:] if len(tensor.shape) < 3 else tensor.shape
    is_vector = len(tensor.shape) < 2
    if is_vector:
        rows, columns = columns, 1
    if tensor.dtype in GGUF_FORMS:
        form = Stored(*GGUF_FORMS[tensor.dtype])
        return Matrix(tensor.name, part_of(tensor.name), rows, columns, form, tensor.num_bytes, tensor.dtype)
    stored = Stored(FLOAT_BITS.get(tensor.dtype, 8 * tensor.num_bytes // max(1, math.prod(tensor.shape))))
    part = Part.EXPERTS if len(tensor.shape) == 3 else part_of(tensor.name)
    return Matrix(
        tensor.name, part, rows, columns, stored, tensor.num_bytes, tensor.dtype, math.prod(counts), is_vector
    )


def quantised(
    module: str, parts: Mapping[str, TensorHeader], quantization: Mapping[str, Any], config: Mapping[str, Any]
) -> Matrix | None:
    """The quantised matrix that several tensors of a module make; None if they are plain."""
    found = None
    if "qweight" in parts and "scales" in parts:
        found = _of_columns(parts, quantization)
    elif "weight_packed" in parts and "weight_scale" in parts:
        found = _of_rows(parts["weight_packed"].shape, 32, parts["weight_scale"], _num_bits(quantization))
        found = found and (*found[:3], "weight_zero_point" in parts)
    elif "blocks" in parts and "scales" in parts:
        *_, rows, groups, _ = parts["blocks"].shape
        found = rows, groups * 32, Stored(4, 32), False
    elif any(suffix.startswith("weight.quant_state") for suffix in parts):
        columns = int(config.get("hidden_size") or 1)
        rows = 2 * math.prod(parts["weight"].shape) // columns
        found = rows, columns, Stored(4, 64), False
    elif "weight" in parts and parts["weight"].dtype in ("I8", "F8_E4M3", "F8_E5M2"):
        scale = next(
            (parts[name] for name in ("weight_scale", "weight_scale_inv", "SCB") if name in parts), None
        )
        found = _of_bytes(parts["weight"], scale)
    if found is None:
        return None
    rows, columns, stored, has_offsets = found
    shape = next(iter(parts.values())).shape if "blocks" in parts else ()
    num_bytes = sum(tensor.num_bytes for suffix, tensor in parts.items() if suffix != "bias")
    count = shape[0] if len(shape) == 4 else 1
    part = part_of(f"{module}.weight")
    return Matrix(module, part, rows, columns, stored._replace(has_offsets=has_offsets), num_bytes, "", count)


_Found = tuple[int, int, Stored, bool]


def _of_columns(parts: Mapping[str, TensorHeader], quantization: Mapping[str, Any]) -> _Found | None:
    """AWQ's and GPTQ's form: codes in int32, scales [groups, N]."""
    bits = int(quantization.get("bits") or quantization.get("w_bit") or 4)
    groups, rows = (1, *parts["scales"].shape)[-2:]
    columns = math.prod(parts["qweight"].shape) * 32 // bits // max(1, rows)
    group = _served_group(columns // max(1, groups))
    return rows, columns, Stored(4 if bits <= 4 else 8, group), not quantization.get("sym", False)


def _of_rows(shape: Sequence[int], word: int, scale: TensorHeader, bits: int) -> _Found | None:
    """compressed-tensors' form: codes [N, K * bits / word], scales [N, groups]."""
    if len(shape) != 2:
        return None
    rows, columns = shape[0], shape[1] * word // bits
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    return rows, columns, Stored(4 if bits <= 4 else 8, _served_group(columns // max(1, groups))), False


def _of_bytes(weight: TensorHeader, scale: TensorHeader | None) -> _Found | None:
    """8-bit numbers, one in a byte: integers keep their scales, fp8 is held as integers with groups of 32."""
    if len(weight.shape) != 2:
        return None
    rows, columns = weight.shape
    if weight.dtype != "I8":
        return rows, columns, Stored(8, 32), False
    groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 and scale.shape[0] == rows else 1
    return rows, columns, Stored(8, _served_group(columns // max(1, groups)) if groups > 1 else None), False


def _served_group(group: int) -> int | None:
    """The group of columns that a product has scales for: at most 128; larger ones repeat their scales."""
    return next((size for size in (128, 64, 32, 16) if group % size == 0), 16)


def _num_bits(quantization: Mapping[str, Any]) -> int:
    """Bits of the weights in a compressed-tensors configuration."""
    for group in (quantization.get("config_groups") or {}).values():
        if bits := ((group or {}).get("weights") or {}).get("num_bits"):
            return int(bits)
    return 4
