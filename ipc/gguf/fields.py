"""The metadata of a GGUF file under the names of its architecture, and settings that several of them share."""

from __future__ import annotations

import math
import os
import struct
from array import array
from typing import Any

from pagewire.ipc.gguf.file import GgufError, GgufFile

Values = dict[str, Any]
NUMBER = (int, float)


class Fields:
    """The metadata of a file under the prefix of its architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._prefix = file, file.architecture
        self.path = file.path

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive integer; of an array with a value for each layer, the one that they share.

        Raises:
            GgufError: there is none and no default, or layers differ.
        """
        value = self._file.get(f"{self._prefix}.{name}", (int, array), default)
        if isinstance(value, array):
            if len(set(value)) != 1:
                raise GgufError(f"{self._file.path}: layers differ in {name}, which is not served")
            value = value[0]
        if not isinstance(value, int) or not 0 < value < 1 << 31:
            raise GgufError(f"{self._file.path}: {self._prefix}.{name} is {value}, not a positive integer")
        return value

    def first(self, name: str, default: int | None = None) -> int:
        """As `whole`; of an array, the first value that is positive."""
        value = self._file.get(f"{self._prefix}.{name}", (int, array), default)
        if isinstance(value, array) and value.typecode not in "fd":
            value = next((own for own in value if 0 < own < 1 << 31), None)
            return self.whole(name, default) if value is None else value
        return self.whole(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number.

        Raises:
            GgufError: there is none and no default.
        """
        value = self._file.get(f"{self._prefix}.{name}", NUMBER, default)
        if value is None or not math.isfinite(value):
            raise GgufError(f"{self._file.path}: {self._prefix}.{name} is {value}, not a number")
        return float(value)

    def get(self, name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of one of these types, or the default."""
        return self._file.get(f"{self._prefix}.{name}", kinds, default)


def shape_of(file: GgufFile, name: str, num_dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor.

    Raises:
        GgufError: there is none, or it has another number of dimensions.
    """
    info = file.tensors.get(name)
    if info is None:
        raise GgufError(f"{file.path} has no tensor {name}")
    if len(info.shape) != num_dimensions:
        raise GgufError(f"{file.path}: the tensor {name} is of shape {info.shape}")
    return info.shape


def head_size(fields: Fields) -> int:
    """The size of an attention head."""
    default = fields.whole("embedding_length") // fields.whole("attention.head_count")
    return fields.whole("attention.key_length", max(1, default))


def read_floats(file: GgufFile, name: str) -> list[float]:
    """The values of a small tensor of type F32.

    Raises:
        GgufError: it is missing, large, or of another type.
    """
    (size,) = shape_of(file, name, 1)
    info = file.tensors[name]
    if info.type != "F32" or size > 1 << 12:
        raise GgufError(f"{file.path}: the tensor {name} has {size} values of type {info.type}")
    with info.path.open("rb") as opened:
        content = os.pread(opened.fileno(), info.num_bytes, info.offset)
    if len(content) != info.num_bytes:
        raise GgufError(f"{file.path} is cut off")
    return list(struct.unpack(f"<{size}f", content))


def rms(fields: Fields) -> Values:
    """The setting of RMSNorm."""
    return {"rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5)}


def experts(fields: Fields, name: str) -> Values:
    """How many experts a layer has, and how many a token gets."""
    return {name: fields.whole("expert_count"), "num_experts_per_tok": fields.whole("expert_used_count")}


def expert_fields(file: GgufFile) -> Values:
    """The experts of Qwen's models, which every layer has."""
    return experts(Fields(file), "num_experts") | {
        "moe_intermediate_size": shape_of(file, "blk.0.ffn_gate_exps.weight", 3)[1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def partial_rotary(fields: Fields) -> Values:
    """The share of a head that is rotated."""
    size = head_size(fields)
    return {"partial_rotary_factor": fields.whole("rope.dimension_count", size) / size}
