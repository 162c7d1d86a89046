"""What a model will take in a CPU worker, by the headers of its checkpoint: bytes of each part, and of a token.

Imports no torch: `pagewire inspect` answers in a moment, and a worker knows before it reads any weights.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pagewire.ipc.worker_messages import Parallel
from pagewire.kernels.cpu.build import panels_of
from pagewire.kernels.cpu.panels import ITEM_BYTES, Stored
from pagewire.workers.errors import LoadError
from pagewire.workers.model.dimensions import Dimensions
from pagewire.workers.model.headers import CheckpointHeaders
from pagewire.workers.model.inventory import Matrix, Part, matrices
from pagewire.workers.model.shares import stage_layers
from pagewire.workers.model.structure import has_stack_structure

DTYPE_NAMES = {"half": "float16", "float": "float32"}
KV_ITEM_BYTES = ITEM_BYTES | {"int8": 1, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_SCALE_BYTES = {"int8": 4}  # of a token and head, for K and for V
EIGHT_BITS = Stored(8, 32)


def _everywhere(layers: Stored) -> dict[Part, Stored]:
    """All matrices: those of layers so, embedding and output in 8 bits."""
    return {
        Part.ATTENTION: layers,
        Part.FEED_FORWARD: layers,
        Part.EXPERTS: layers,
        Part.EMBEDDING: EIGHT_BITS,
        Part.OUTPUT: EIGHT_BITS,
    }


ONLINE = {  # how `online.py` holds the matrices of a part that it quantises
    "int8": _everywhere(EIGHT_BITS),
    "fp8": _everywhere(EIGHT_BITS),
    "int4": _everywhere(Stored(4, 32, has_offsets=True)),
    "bitsandbytes": _everywhere(Stored(4, 64)),
    "experts_int8": {Part.EXPERTS: EIGHT_BITS},
}
FILE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
PACKING_ROWS = 1024  # of a matrix that are converted and packed at a time
LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class PartFigures:
    """The figures of a part of a model."""

    part: str
    parameters: int
    bits: float
    """Of a weight in the file, with its scales, on average."""
    file_bytes: int
    packed_bytes: int
    """In the worker's memory; 0 if it is read from the mapped file."""
    read_bytes: int
    """That a token reads, alone in its step."""
    held: str
    """How most of its weights are held: "bfloat16", "int4/32"."""


@dataclass(frozen=True)
class Footprint:
    """The sizes of a model in a CPU worker; bytes unless said otherwise."""

    form: str
    num_files: int
    quantization: str | None
    """Of the checkpoint, or the one that is applied while loading."""
    dimensions: Dimensions
    dtype: str
    """Of activations, and of weights that are not quantised."""
    isa: str
    is_stack: bool
    """True if its layers should run in one call: the proof has the last word."""
    parts: Sequence[PartFigures]
    loading_bytes: int
    """Taken beside the weights while they are loaded and proven."""
    kv_token_bytes: int
    """That a token takes in the KV cache."""
    position_bytes: int
    """That each position up to max_model_len takes, in tables of rotary angles."""
    drafter: Footprint | None = None
    """Of the model that proposes tokens in this worker; the other figures are without it."""

    @property
    def parameters(self) -> int:
        """The number of weights; tied ones count once."""
        return sum(part.parameters for part in self.parts)

    @property
    def file_bytes(self) -> int:
        """Of all tensors in the files."""
        return sum(part.file_bytes for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        """Of the worker's own memory that weights take."""
        return sum(part.packed_bytes for part in self.parts)

    @property
    def panel_bytes(self) -> int:
        """Of these, what the kernels pack."""
        unpacked = (Part.EMBEDDING.value, Part.NORMS.value)
        return sum(part.packed_bytes for part in self.parts if part.part not in unpacked)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values of a layer."""
        return max(1, self.dimensions.kv_scales // max(1, 2 * self.dimensions.num_layers))

    @property
    def read_bytes(self) -> int:
        """Of weights that a token reads, alone in its step."""
        return sum(part.read_bytes for part in self.parts)


def footprint(
    headers: CheckpointHeaders,
    isa: str,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_dtype: str = "auto",
) -> Footprint:
    """The footprint of a checkpoint.

    isa: the instruction set of the kernels. dtype, quantization, kv_dtype: the engine's options.

    Raises:
        LoadError: its configuration has sizes of another form.
    """
    try:
        found = list(matrices(headers.tensors, headers.config))
        dimensions = Dimensions.of(headers.config, found)
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise LoadError(f"the sizes of this model cannot be told: {error!r}") from error
    own = dimensions.dtype if dtype == "auto" else DTYPE_NAMES.get(dtype, dtype)
    method = _method(headers.config, found) or quantization
    held = [_Held.of(matrix, own, quantization, isa) for matrix in found]
    tied = next((h for h in held if h.matrix.part is Part.EMBEDDING), None)
    if tied is not None and not any(h.matrix.part is Part.OUTPUT and not h.matrix.is_vector for h in held):
        held.append(_Held.of_tied(tied.matrix, own, quantization, isa))
    share = min(1.0, dimensions.experts_per_token / dimensions.num_experts) if dimensions.num_experts else 1.0
    kv_item = KV_ITEM_BYTES[own if kv_dtype == "auto" else DTYPE_NAMES.get(kv_dtype, kv_dtype)]
    return Footprint(
        form=headers.form,
        num_files=headers.num_files,
        quantization=method,
        dimensions=dimensions,
        dtype=own,
        isa=isa,
        is_stack=has_stack_structure(
            dimensions.model_type, [matrix.name for matrix in found], headers.config
        ),
        parts=_parts(held, share or 1.0),
        loading_bytes=_loading_bytes(held, own),
        kv_token_bytes=dimensions.kv_elements * kv_item
        + dimensions.kv_scales * KV_SCALE_BYTES.get(kv_dtype, 0),
        position_bytes=dimensions.rotary_elements * ITEM_BYTES[own],
    )


def of_rank(whole: Footprint, parallel: Parallel, undivided: Sequence[Part] = ()) -> Footprint:
    """The footprint of a rank that has its part of a model, the largest in its stage.

    While loading it may take as much as alone: rank 0 runs a layer of the whole model at a time.

    undivided: parts that every rank has as a whole, beside norms and what is of no part.

    Raises:
        LoadError: the layers cannot be divided into so many stages.
    """
    size = parallel.num_shards
    if parallel.stages > 1:
        whole = _of_stage(whole, parallel)
    if size == 1:
        return whole
    kv_share = min(1.0, -(-whole.kv_heads // size) / whole.kv_heads)
    everywhere = {part.value for part in (Part.NORMS, Part.OTHER, *undivided)}
    parts = [
        part
        if part.part in everywhere
        else replace(part, packed_bytes=-(-part.packed_bytes // size), read_bytes=-(-part.read_bytes // size))
        for part in whole.parts
    ]
    return replace(whole, parts=parts, kv_token_bytes=int(whole.kv_token_bytes * kv_share))


def _of_stage(whole: Footprint, parallel: Parallel) -> Footprint:
    """The footprint of a stage: its layers, and embedding and output layer only in the first and in the last."""
    num_layers = whole.dimensions.num_layers
    share = len(stage_layers(num_layers, parallel)) / num_layers if num_layers else 1 / parallel.stages
    elsewhere = {
        Part.EMBEDDING.value: float(parallel.stage == 0),
        Part.OUTPUT.value: float(parallel.stage == parallel.stages - 1),
    }
    parts = []
    for part in whole.parts:
        own = elsewhere.get(part.part, share)
        packed, read = math.ceil(part.packed_bytes * own), math.ceil(part.read_bytes * own)
        parts.append(replace(part, packed_bytes=packed, read_bytes=read))
    return replace(whole, parts=parts, kv_token_bytes=math.ceil(whole.kv_token_bytes * share))


def _method(config: Mapping[str, object], found: Iterable[Matrix]) -> str | None:
    """The name of the checkpoint's quantisation."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        return str(quantization.get("quant_method") or "unknown")
    types = Counter(matrix.dtype for matrix in found if not matrix.stored.is_float)
    return types.most_common(1)[0][0] if types else None


@dataclass(frozen=True)
class _Held:
    """A matrix, and how the worker will hold it."""

    matrix: Matrix
    stored: Stored
    packed_bytes: int
    is_copy: bool
    """False if it is used where the file is mapped."""

    @classmethod
    def of(cls, matrix: Matrix, dtype: str, quantization: str | None, isa: str) -> _Held:
        itemsize, stored, panels = ITEM_BYTES[dtype], matrix.stored, panels_of(isa)
        if stored.is_float and quantization in ONLINE and not matrix.is_vector:
            stored = ONLINE[quantization].get(matrix.part, stored)
        if stored.is_float:
            is_copy = FILE_DTYPES.get(matrix.dtype) != dtype
            stored = Stored(8 * itemsize)
            if matrix.is_vector or matrix.part is Part.EMBEDDING:
                return cls(matrix, stored, matrix.num_weights * itemsize, is_copy)
            size = panels.float_size(matrix.rows, matrix.columns, dtype) * itemsize
        else:
            size = panels.integer_bytes(matrix.rows, matrix.columns, stored)
        return cls(matrix, stored, matrix.count * size, True)

    @classmethod
    def of_tied(cls, embedding: Matrix, dtype: str, quantization: str | None, isa: str) -> _Held:
        """The output layer that is packed from the embedding's weights, which count there."""
        output = replace(embedding, name="lm_head.weight", part=Part.OUTPUT, num_bytes=0)
        return cls.of(output, dtype, quantization, isa)


def _parts(held: Iterable[_Held], expert_share: float) -> list[PartFigures]:
    """The figures of each part. expert_share: of the experts that run for a token."""
    by_part: dict[Part, list[_Held]] = {}
    for h in held:
        by_part.setdefault(h.matrix.part, []).append(h)
    figures = []
    for part in Part:
        if part not in by_part:
            continue
        of_part = by_part[part]
        weights = sum(h.matrix.num_weights for h in of_part if h.matrix.num_bytes)
        file_bytes = sum(h.matrix.num_bytes for h in of_part)
        packed = sum(h.packed_bytes for h in of_part)
        read = {Part.EMBEDDING: 0, Part.EXPERTS: int(packed * expert_share)}.get(part, packed)
        sizes: Counter[str] = Counter()
        for h in of_part:
            sizes[h.stored.name] += h.packed_bytes
        figures.append(
            PartFigures(
                part=part.value,
                parameters=weights,
                bits=8 * file_bytes / weights if weights else 0.0,
                file_bytes=file_bytes,
                packed_bytes=sum(h.packed_bytes for h in of_part if h.is_copy),
                read_bytes=read,
                held=sizes.most_common(1)[0][0],
            )
        )
    return figures


def _loading_bytes(held: Iterable[_Held], dtype: str) -> int:
    """What loading takes beside the weights: the largest layer in `dtype` while the model is proven, or packing.

    Weights that have that dtype in the file are not copied for the proof. Experts that it holds one by one are
    put together for it in any case.
    """
    itemsize, largest, outside = ITEM_BYTES[dtype], 0, 0
    layers: Counter[str] = Counter()
    for h in held:
        matrix = h.matrix
        largest = max(largest, min(matrix.rows, PACKING_ROWS) * matrix.columns * itemsize)
        together = matrix.part is Part.EXPERTS and matrix.count == 1
        if FILE_DTYPES.get(matrix.dtype) == dtype and not together:
            continue
        size = matrix.num_weights * itemsize
        if layer := LAYER.search(matrix.name):
            layers[layer[1]] += size
        elif matrix.part is Part.OUTPUT and matrix.num_bytes:
            outside += size
    return outside + max(layers.values(), default=0) + largest
