"""What the bytes of a KV block depend on beside its name, as a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.caches.kv import KVShape
from pagewire.workers.caches.states import StateShape
from pagewire.workers.tiers.entry import MAGIC
from pagewire.workers.weight_cache.key import chosen_isa, contents, fingerprint


def identity_of(
    config: WorkerConfig,
    shapes: Sequence[KVShape],
    state_shapes: Sequence[StateShape] = (),
    *,
    anywhere: bool = False,
) -> bytes:
    """The identity (32 bytes) of the blocks of a model with these layers' caches and states.

    The order of elements in a block, and the last bits of what is computed, are those of an instruction set, so
    this is a part of it, as are the checkpoint's files, the settings and the code that runs them.
    anywhere: it is the same on another machine, where the checkpoint is a copy; so all of its bytes are read.

    Raises:
        OSError: a file of the checkpoint cannot be read.
    """
    layout = [
        [
            shape.num_kv_heads,
            shape.head_dim,
            shape.v_head_dim,
            str(shape.dtype),
            shape.source,
            shape.values_in_keys,
            shape.index_dim,
            str(shape.index_dtype),
        ]
        for shape in shapes
    ]
    parallel = config.parallel
    parts = [
        MAGIC,
        fingerprint(config, chosen_isa(), contents if anywhere else None),
        layout,
        config.block_size,
        config.lora,
        [parallel.rank, parallel.size, parallel.stages],
        *([list(state_shapes)] if state_shapes else []),
    ]
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()
