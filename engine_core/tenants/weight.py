"""The memory that a request takes in the core while it is unfinished: its tokens, its values, and its content.

What it generates is not counted: only running sequences grow, and the KV cache bounds those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, TypeAlias

import msgspec

from pagewire.ipc.wire.budget import POINTER_BYTES, VALUE_BYTES
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.tasks import LARGE

ENTRY_BYTES = 1600  # a request, a sequence or a medium, without its tokens, parameters and content

Parts: TypeAlias = tuple[tuple[object, int], ...]  # objects, each with its bytes


@dataclass(frozen=True, slots=True)
class RequestWeight:
    """The memory of one request.

    own_bytes: what it shares with no other one. parts: objects that other requests may have, too, such as long
    lists of equal parameters (`ipc.tasks.share_tasks`) and contents of media, each once, with its bytes.
    """

    own_bytes: int
    parts: Parts = ()


def weigh(request: Request, known: Mapping[int, tuple[int, int]]) -> RequestWeight:
    """The weight of a request whose numbers are those that all prompts have (`MessageIntake`).

    known: parts that were weighed already: by identity, tuples that begin with the bytes.
    """
    prompt, task = request.prompt, request.task
    num_sequences = task.n if isinstance(task, SamplingParams) else 1
    num_tokens = len(prompt.token_ids) * (1 + num_sequences)
    num_tokens += 2 * sum(map(len, request.output_token_ids or ()))
    texts = [request.request_id, request.tenant, prompt.cache_salt or ""]
    if (adapter := request.adapter) is not None:
        texts += [adapter.name, adapter.path, adapter.version]
    own_bytes = ENTRY_BYTES * (1 + num_sequences + len(prompt.media)) + POINTER_BYTES * num_tokens
    parts = {id(medium.data): (medium.data, len(medium.data.data)) for medium in prompt.media}
    for name in LARGE if isinstance(task, SamplingParams) else ():
        if (value := getattr(task, name)) is not None:
            size = known[id(value)][0] if id(value) in known else parameter_bytes(name, value)
            parts[id(value)] = value, size
    return RequestWeight(own_bytes + sum(map(getsizeof, texts)), tuple(parts.values()))


def parameter_bytes(name: str, value: Any) -> int:
    """The memory of a parameter of this name that may be large."""
    if name == "extra_args":  # of any form: each encoded byte may be a value
        return VALUE_BYTES * len(msgspec.msgpack.encode(value))
    if isinstance(value, dict):
        return 2 * VALUE_BYTES * len(value)
    return text_bytes(list(msgspec.structs.astuple(value)) if name == "structured_outputs" else value)


def text_bytes(value: Any) -> int:
    """The memory of a string, of a list of strings or of numbers, or of a list of such."""
    if isinstance(value, str):
        return POINTER_BYTES + getsizeof(value)
    if not isinstance(value, list):
        return 0
    if value and isinstance(value[0], int):
        return VALUE_BYTES * (1 + len(value))
    return VALUE_BYTES + sum(map(text_bytes, value))
