"""How a frontend names a LoRA adapter to the core, and the messages with which workers load and drop them.

The core numbers the adapters that are loaded; 0 is the model without one. It decides which ones are, by their
bytes, and plans no row of an adapter before its `AdapterLoaded`. Plans and these messages are handled in order:
what was planned before a `DropAdapter` still runs with the adapter.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.ipc.wire.budget import MAX_NAME_CHARS
from pagewire.ipc.wire.items import Item, Message

MAX_PATH_CHARS = 4096  # as Linux has it
MAX_ADAPTER_ID = 2**31 - 1
# What belongs to an adapter in its folder: a change of any of these makes another version.
ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "new_embeddings.safetensors",
)

AdapterName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
AdapterId: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_ADAPTER_ID)]
AdapterPath: TypeAlias = Annotated[str, Meta(max_length=MAX_PATH_CHARS, pattern=r"^(/[^\x00]*)?$")]
AdapterVersion: TypeAlias = Annotated[str, Meta(max_length=128)]


class AdapterSource(Item):
    """An adapter, as a request names it.

    name, adapter_id: chosen by the program; for people, metrics and calls.
    path: its folder, absolute, on the machines of the workers; empty: the adapter that is registered as `name`.
    version: of the folder's files, as the frontend saw them; with another version the core reads them again.
    """

    name: AdapterName
    adapter_id: AdapterId
    path: AdapterPath = ""
    version: AdapterVersion = ""


class LoRAConfig(msgspec.Struct, omit_defaults=True, frozen=True):
    """Limits of the adapters that a worker loads, and the form in which it keeps them.

    max_loras: adapters in one batch. max_lora_rank: the largest rank; every adapter keeps its own.
    max_cpu_loras: adapters in memory; None: as many as the core finds room for.
    lora_dtype: "auto" (the model's), "float32", "bfloat16" or "float16".
    extra_vocab_size: the most tokens that an adapter may add to the vocabulary.
    long_lora_scaling_factors: factors of rotary position embeddings that adapters may have been trained with.
    fully_sharded: ranks cut both matrices of an adapter, not only the one that the model's own weight is cut in.
    allow_pickle: read `adapter_model.bin` where there is no safetensors file, through torch's restricted unpickler.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    extra_vocab_size: int = 256
    long_lora_scaling_factors: list[float] = []
    fully_sharded: bool = False
    allow_pickle: bool = False


class LoadAdapter(Message, tag="load_adapter"):
    """Read an adapter from a folder, beside the steps; answered by `AdapterLoaded`.

    index: at least 1, and of no adapter that is loaded. path: the folder.
    content: what the folder held when it was loaded before; empty: anything.
    """

    index: int
    path: str
    content: bytes = b""


class DropAdapter(Message, tag="drop_adapter"):
    """Free an adapter, also one that is still being loaded; its `AdapterLoaded` may be on its way already."""

    index: int


class AdapterLoaded(Message, tag="adapter_loaded"):
    """An adapter can be planned, or cannot be loaded because of `error`; the other fields are then empty.

    content: sha256 of the adapter's configuration and tensors. num_bytes: of memory that it takes.
    rank: the largest of its ranks. num_extra_tokens: tokens behind the model's vocabulary, which its rows may hold.
    error_type: name of an exception (`ipc.errors.ERROR_TYPES`).
    """

    index: int
    content: bytes = b""
    num_bytes: int = 0
    rank: int = 0
    num_extra_tokens: int = 0
    error: str | None = None
    error_type: str | None = None
