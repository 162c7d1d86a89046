"""The figures of a model as its worker expects them before it reads any weights, for `Ready` and `EngineInfo`."""

from __future__ import annotations

import msgspec


class ModelFigures(msgspec.Struct, omit_defaults=True, frozen=True):
    """Sizes by the headers of a checkpoint; bytes unless said otherwise.

    form: of its files, such as "safetensors". quantization: of its weights; None: plain floats.
    parameters: the number of weights. bits: of each in the files, on average. file_bytes: of all tensors.
    weight_bytes: of the worker's memory once they are packed. memory_bytes: weights, interpreter and libraries.
    token_read_bytes: of weights that a token reads, alone in its step. kv_token_bytes: what it adds to the KV
        cache.
    is_stack: its layers should run in one call. isa: the instruction set of the kernels.
    """

    form: str
    quantization: str | None
    parameters: int
    bits: float
    file_bytes: int
    weight_bytes: int
    memory_bytes: int
    token_read_bytes: int
    kv_token_bytes: int
    is_stack: bool
    isa: str
