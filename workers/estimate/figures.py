"""What a model will take in a worker, by the headers of its checkpoint, and how fast it should be on a CPU.

Imports no torch: `pagewire inspect` answers in a moment, and a worker knows before it reads any weights.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagewire.ipc.quantization import DEQUANTIZE, ONLINE
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.kernels.cpu.build import panels_of
from pagewire.kernels.cpu.panels import ITEM_BYTES, NumberFormat, Panels
from pagewire.kernels.cuda.limits import LATENTS
from pagewire.workers.checkpoint.formats.online import quantised_as
from pagewire.workers.checkpoint.headers import DTYPES, Headers
from pagewire.workers.device.auto_dtype import auto_dtype
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.dimensions import Dimensions
from pagewire.workers.estimate.gpu_layout import GPU, GpuLayout
from pagewire.workers.estimate.inventory import Matrix, Part, matrices
from pagewire.workers.estimate.states import recurrent_modules
from pagewire.workers.module.structure import has_stack_structure
from pagewire.workers.ranks.shares import stage_layers

DTYPE_NAMES = {"half": "float16", "float": "float32"}
KV_ITEM_BYTES = ITEM_BYTES | {"int8": 1, "int4": 0.5, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_SCALE_BYTES = {"int8": 4, "int4": 4}  # of a token and head, for K and for V, or of each of its groups
KV_GROUPS = {"int4": 32}  # elements of a group
PACKING_ROWS = 1024  # of a matrix that are converted and packed at a time
# The share of the machine's reading rate that all products of a step of one row reach together, by how weights are
# held: `python -m benchmarks.inspect_accuracy` with a Llama of 300M on two cores of an AMD EPYC, to a tenth; 4 bits
# reach 0.7 there, and 0.5 with SmolLM2-135M, whose matrices are small. 6 bits are taken to reach what 8 do.
# Alone, a product reaches more (`benchmarks.kernels_cpu`). Integers are unpacked as they are read.
REACHED = {"float32": 0.7, "float16": 0.7, "int8": 0.7, "int6": 0.7, "int4": 0.6}
STEP_SECONDS = 400e-6  # of a step beside its layers: messages, batch, sampling
STACK_LAYER_SECONDS = 12e-6  # of a layer beside reading its weights, where all layers run in one call
MODULE_LAYER_SECONDS = 350e-6  # the same where transformers' modules run
LAYER = re.compile(r"(?:^|\.)(\d+)\.")
UNDIVIDED = (Part.NORMS, Part.OTHER)
"""Parts that every rank has as a whole."""


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
    """The sizes of a model in a worker; bytes unless said otherwise."""

    form: str
    num_files: int
    quantization: str | None
    """Of the checkpoint, or the one that is applied while loading."""
    dimensions: Dimensions
    dtype: str
    """Of activations, and of weights that are not quantised."""
    isa: str
    """The instruction set of the kernels; `GPU` for those of a GPU."""
    is_stack: bool
    """True if its layers should run in one call: the proof has the last word."""
    parts: Sequence[PartFigures]
    loading_bytes: int
    """Taken beside the weights while they are loaded and proven."""
    kv_token_bytes: int
    """That a token takes in the KV cache."""
    state_bytes: int
    """That the states of all layers take, for a sequence of any length."""
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
    headers: Headers, isa: str, dtype: str = "auto", quantization: str | None = None, kv_dtype: str = "auto"
) -> Footprint:
    """The footprint of a checkpoint.

    isa: the instruction set of the kernels, or `GPU`. dtype, quantization, kv_dtype: the engine's options.

    Raises:
        LoadError: its configuration has sizes of another form, its tensors are of a format that is not served, or
            it has latents, which a KV cache of 4 bits does not take.
    """
    try:
        found = list(matrices(headers.tensors, headers.config, headers.foreign))
        recurrent = recurrent_modules(headers.tensors)
        dimensions = Dimensions.of(headers.config, found, recurrent)
        own = DTYPE_NAMES.get(dtype, dtype)
        if dtype == "auto":
            own = auto_dtype(dimensions.dtype, None if isa == GPU else isa)
        if isa == GPU and own != "float32":  # in which PyTorch attends, to latents of all sizes
            dimensions = Dimensions.of(headers.config, found, recurrent, latents=LATENTS)
    except LoadError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise LoadError(f"the sizes of this model cannot be told: {error!r}") from error
    if kv_dtype == "int4" and dimensions.has_latents:
        raise LoadError(
            f"kv_cache_dtype 'int4' is not for the latents of {dimensions.model_type}: use 'int8'"
        )
    layout: Panels | GpuLayout = GpuLayout(own) if isa == GPU else panels_of(isa)
    embedding = next((matrix for matrix in found if matrix.part is Part.EMBEDDING), None)
    is_tied = not any(matrix.part is Part.OUTPUT and not matrix.is_vector for matrix in found)
    all_matrices = list(found)
    if embedding is not None and is_tied:  # its weights count there, and are packed for the output layer
        all_matrices.append(replace(embedding, name="lm_head.weight", part=Part.OUTPUT, num_bytes=0))
    held = [_held(matrix, own, quantization, layout) for matrix in all_matrices]
    share = min(1.0, dimensions.experts_per_token / dimensions.num_experts) if dimensions.num_experts else 1.0
    by_part = {part: [h for h in held if h.matrix.part is part] for part in Part}
    kv_item = KV_ITEM_BYTES[own if kv_dtype == "auto" else DTYPE_NAMES.get(kv_dtype, kv_dtype)]
    kv_size = dimensions.kv_elements // max(1, dimensions.kv_scales)  # of a head
    kv_groups = -(-kv_size // KV_GROUPS.get(kv_dtype, max(1, kv_size)))
    names = [matrix.name for matrix in found]
    return Footprint(
        form=headers.form,
        num_files=headers.num_files,
        quantization=_method(headers.config, found) or quantization,
        dimensions=dimensions,
        dtype=own,
        isa=isa,
        is_stack=has_stack_structure(dimensions.model_type, names, headers.config),
        parts=[_figures(part, of_part, share or 1.0) for part, of_part in by_part.items() if of_part],
        loading_bytes=_loading_bytes(held, own),
        kv_token_bytes=int(dimensions.kv_elements * kv_item)
        + dimensions.index_elements * ITEM_BYTES[own]
        + dimensions.kv_scales * kv_groups * KV_SCALE_BYTES.get(kv_dtype, 0),
        state_bytes=dimensions.state_bytes,
        position_bytes=dimensions.rotary_elements * ITEM_BYTES[own],
    )


def of_rank(whole: Footprint, parallel: Parallel, undivided: Sequence[Part] = ()) -> Footprint:
    """The footprint of a rank that has its part of a model, the largest in its stage.

    A stage has its layers; the first one has the embedding, the last one the output layer. While loading it may
    take as much as alone: rank 0 runs a layer of the whole model at a time.

    undivided: parts that every rank has as a whole, beside `UNDIVIDED`.

    Raises:
        LoadError: the layers cannot be divided into that number of stages.
    """
    size, num_layers = parallel.num_shards, whole.dimensions.num_layers
    layers = 1.0
    shares = dict.fromkeys(Part, 1.0)
    if parallel.stages > 1:
        layers = len(stage_layers(num_layers, parallel)) / num_layers if num_layers else 1 / parallel.stages
        shares = dict.fromkeys(Part, layers) | {
            Part.EMBEDDING: float(parallel.stage == 0),
            Part.OUTPUT: float(parallel.stage == parallel.stages - 1),
        }
    shares = {
        part: share if part in (*UNDIVIDED, *undivided) else share / size for part, share in shares.items()
    }
    parts = [
        replace(
            part,
            packed_bytes=math.ceil(part.packed_bytes * shares[Part(part.part)]),
            read_bytes=math.ceil(part.read_bytes * shares[Part(part.part)]),
        )
        for part in whole.parts
    ]
    kv_share = min(1.0, -(-whole.kv_heads // size) / whole.kv_heads)
    return replace(
        whole,
        parts=parts,
        kv_token_bytes=int(math.ceil(whole.kv_token_bytes * layers) * kv_share),
        # A rank has some of the heads; states that are not divided are refused when the model is loaded.
        state_bytes=math.ceil(whole.state_bytes * layers / size),
    )


def _method(config: Mapping[str, object], found: Iterable[Matrix]) -> str | None:
    """The name of the checkpoint's quantisation."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        return str(quantization.get("quant_method") or "unknown")
    types = Counter(matrix.dtype for matrix in found if not matrix.stored.is_float)
    return types.most_common(1)[0][0] if types else None


class _Held(NamedTuple):
    """A matrix, and how the worker will hold it."""

    matrix: Matrix
    stored: NumberFormat
    packed_bytes: int
    is_copy: bool
    """False if it is used where the file is mapped, or on a GPU the embedding, to which it is tied."""


def _held(matrix: Matrix, dtype: str, quantization: str | None, panels: Panels | GpuLayout) -> _Held:
    rows, columns, stored, itemsize = matrix.rows, matrix.columns, matrix.stored, ITEM_BYTES[dtype]
    if quantization == DEQUANTIZE:
        stored = NumberFormat(8 * itemsize)
    if quantization in ONLINE and stored.is_float and not matrix.is_vector and matrix.part not in UNDIVIDED:
        stored = quantised_as(quantization, matrix.name.removesuffix(".weight"), columns) or stored
    if matrix.part is Part.EMBEDDING and stored.bits == 6:
        stored = stored._replace(bits=8)  # no product reads it: a code has a byte
    on_gpu = isinstance(panels, GpuLayout)
    if isinstance(panels, GpuLayout):
        is_dense = matrix.is_vector or matrix.part is Part.EMBEDDING
        stored = NumberFormat(8 * itemsize) if is_dense else panels.held(stored, columns)
    if not stored.is_float:
        return _Held(matrix, stored, matrix.count * panels.integer_bytes(rows, columns, stored), True)
    stored = NumberFormat(8 * itemsize)
    if matrix.is_vector or matrix.part is Part.EMBEDDING:
        is_copy = on_gpu or DTYPES.get(matrix.dtype) != dtype
        return _Held(matrix, stored, matrix.num_weights * itemsize, is_copy)
    size = matrix.count * panels.float_size(rows, columns, dtype) * itemsize
    return _Held(matrix, stored, size, not on_gpu or matrix.num_bytes > 0)


def _figures(part: Part, held: Sequence[_Held], expert_share: float) -> PartFigures:
    """The figures of a part. expert_share: of the experts that run for a token."""
    weights = sum(h.matrix.num_weights for h in held if h.matrix.num_bytes)
    file_bytes = sum(h.matrix.num_bytes for h in held)
    packed = sum(h.packed_bytes for h in held)
    sizes: Counter[str] = Counter()
    for h in held:
        sizes[h.stored.name] += h.packed_bytes
    return PartFigures(
        part=part.value,
        parameters=weights,
        bits=8 * file_bytes / weights if weights else 0.0,
        file_bytes=file_bytes,
        packed_bytes=sum(h.packed_bytes for h in held if h.is_copy),
        read_bytes={Part.EMBEDDING: 0, Part.EXPERTS: int(packed * expert_share)}.get(part, packed),
        held=sizes.most_common(1)[0][0],
    )


def _loading_bytes(held: Iterable[_Held], dtype: str) -> int:
    """What loading takes beside the weights: the largest layer in `dtype` while the model is proven, or packing.

    Weights that have that dtype in the file are not copied for the proof. Experts that it holds one by one are
    put together in any case.
    """
    itemsize, largest, outside = ITEM_BYTES[dtype], 0, 0
    layers: Counter[str] = Counter()
    for matrix in (h.matrix for h in held):
        largest = max(largest, min(matrix.rows, PACKING_ROWS) * matrix.columns * itemsize)
        together = matrix.part is Part.EXPERTS and matrix.count == 1
        if DTYPES.get(matrix.dtype) == dtype and not together:
            continue
        if layer := LAYER.search(matrix.name):
            layers[layer[1]] += matrix.num_weights * itemsize
        elif matrix.part is Part.OUTPUT and matrix.num_bytes:
            outside += matrix.num_weights * itemsize
    return outside + max(layers.values(), default=0) + largest


@dataclass(frozen=True)
class Speed:
    """The expected speed of a request that runs alone."""

    read_rate: float
    """Bytes per second that the machine reads, by measurement."""
    token_seconds: float
    """A token with little context."""
    context_seconds: float
    """What each thousand tokens of context add to that."""

    @property
    def tokens_per_second(self) -> float:
        """With little context."""
        return 1 / self.token_seconds


def expected_speed(sizes: Footprint, read_rate: float) -> Speed:
    """The speed of a model on a machine that reads `read_rate` bytes per second with the worker's threads."""
    reading = sum(part.read_bytes / REACHED[part.held.partition("/")[0]] for part in sizes.parts) / read_rate
    layer = STACK_LAYER_SECONDS if sizes.is_stack else MODULE_LAYER_SECONDS
    return Speed(
        read_rate=read_rate,
        token_seconds=reading + STEP_SECONDS + sizes.dimensions.num_layers * layer,
        context_seconds=1000 * sizes.kv_token_bytes / read_rate,
    )
