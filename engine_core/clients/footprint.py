"""Estimates of the memory that a request takes in the core while it is unfinished, from the sizes of its parts.

What it generates is not counted: only running sequences grow, and the KV cache bounds those. Sizes are those of
CPython's objects on 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import getsizeof
from typing import Any, TypeAlias

import msgspec

from pagewire.ipc.wire.budget import POINTER_BYTES
from pagewire.ipc.wire.params import SamplingParams, StructuredOutputsParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.tasks import LARGE

INTEGER_BYTES, FLOAT_BYTES = 32, 24
REQUEST_BYTES = 2000  # the request, its prompt, its parameters without lists and long strings
SEQUENCE_BYTES = 1200  # a sequence, its empty lists, and its places in queues and tables
STRUCTURE_BYTES = 150
MEDIUM_BYTES = 300
EXTRA_BYTES = 72  # per encoded byte of extra_args: an empty list takes one
Parts: TypeAlias = tuple[tuple[object, int], ...]  # objects, each with its bytes


@dataclass(frozen=True, slots=True)
class RequestFootprint:
    """The memory of one request.

    own_bytes: what it shares with no other one. parts: objects that other requests may have, too, such as long
    lists of equal parameters (`ipc.tasks.share_tasks`) and contents of media, each once, with its bytes.
    """

    own_bytes: int
    parts: Parts = ()


def footprint_of(request: Request, parameters: Parts | None = None) -> RequestFootprint:
    """The memory that a request takes once its numbers are those that all prompts have (`MessageIntake`).

    parameters: what `large_parameters` of its task gives; None: it is called here.
    """
    prompt, task, done = request.prompt, request.task, request.output_token_ids or ()
    num_sequences = task.n if isinstance(task, SamplingParams) else 1
    num_done = sum(map(len, done))
    num_tokens = len(prompt.token_ids) * (1 + num_sequences) + 2 * num_done
    strings = (request.request_id, request.tenant, prompt.cache_salt or "")
    own_bytes = REQUEST_BYTES + num_sequences * SEQUENCE_BYTES + POINTER_BYTES * num_tokens
    own_bytes += sum(map(getsizeof, strings)) + MEDIUM_BYTES * len(prompt.media)
    if isinstance(task, SamplingParams) and task.extra_args:
        own_bytes += EXTRA_BYTES * len(msgspec.msgpack.encode(task.extra_args))
    if (adapter := request.adapter) is not None:
        own_bytes += sum(map(getsizeof, (adapter.name, adapter.path, adapter.version)))
    sizes: list[tuple[object, int]] = [(medium.data, len(medium.data.data)) for medium in prompt.media]
    sizes += large_parameters(task) if parameters is None else parameters
    parts = {id(part): (part, size) for part, size in sizes}  # a prompt may have a picture twice
    return RequestFootprint(own_bytes, tuple(parts.values()))


def large_parameters(task: SamplingParams | PoolingParams) -> Parts:
    """The parameters that may be large, each with its bytes."""
    if not isinstance(task, SamplingParams):
        return ()
    values = (getattr(task, name) for name in LARGE)
    return tuple((value, parameter_bytes(value)) for value in values if value is not None)


def parameter_bytes(value: Any) -> int:
    """The memory of a parameter: a string, a form of outputs, a list, or a dict of integers to floats."""
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            return getsizeof(value) + INTEGER_BYTES * len(value)
        return getsizeof(value) + sum(map(parameter_bytes, value))
    if isinstance(value, dict):
        return getsizeof(value) + (INTEGER_BYTES + FLOAT_BYTES) * len(value)
    if isinstance(value, StructuredOutputsParams):
        fields = (getattr(value, name) for name in value.__struct_fields__)
        texts = (field for field in fields if isinstance(field, (str, list)))
        return STRUCTURE_BYTES + sum(map(parameter_bytes, texts))
    return getsizeof(value)
