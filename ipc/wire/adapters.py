"""How a frontend names a LoRA adapter to the core. (`ipc.lora` has the messages between core and worker.)"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from pagewire.ipc.wire.budget import MAX_NAME_CHARS
from pagewire.ipc.wire.items import Item

MAX_PATH_CHARS = 4096  # as Linux has it
MAX_ADAPTER_ID = 2**31 - 1
# What belongs to an adapter in its folder: a change of any of these makes another version of it.
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
