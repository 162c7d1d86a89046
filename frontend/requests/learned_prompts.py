"""Reads prompt adapters from the folders that PEFT has written."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pagewire.frontend.requests.prompt_adapters import PromptAdapter, PromptAdapterRequest
from pagewire.frontend.requests.safetensors import read_tensors
from pagewire.ipc.errors import FieldTypeError, FieldValueError
from pagewire.ipc.files.hub import read_json
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import EmbeddingsInfo, check_embeddings, media_of

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TENSOR = "prompt_embeddings"
MAX_FILE_BYTES = 1 << 27
LEARNED_PROMPTS = ("PROMPT_TUNING", "P_TUNING")  # PEFT saves the result of P_TUNING's encoder
TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
OTHER_KINDS = {
    "PREFIX_TUNING": "it has keys and values for each layer, and no embeddings that could stand before a prompt: "
    "train with PROMPT_TUNING or P_TUNING",
    "MULTITASK_PROMPT_TUNING": "its embeddings depend on the task of each input: train with PROMPT_TUNING",
    "LORA": "it changes the model's weights: give it as lora_request",
}


class PromptAdapters:
    """The prompt adapters that a frontend keeps in memory, those used last. Thread-safe.

    One whose files have changed is read again.
    """

    def __init__(self, info: EmbeddingsInfo) -> None:
        self._info = info
        self._kept: OrderedDict[tuple[Any, ...], PromptAdapter] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, request: PromptAdapterRequest) -> PromptAdapter:
        """The adapter of a request.

        Raises:
            ValueError: the engine takes none, or this one cannot be served; the text says why.
            TypeError: it is no `PromptAdapterRequest`.
        """
        if not isinstance(request, PromptAdapterRequest):
            raise FieldTypeError(
                "prompt_adapter_request", f"must be a PromptAdapterRequest, got {type(request).__name__}"
            )
        if not self._info.adapters:
            raise FieldValueError(
                "prompt_adapter_request",
                ": this engine takes no prompt adapters: start it with "
                "enable_prompt_adapter=True (--enable-prompt-adapter)",
            )
        adapter = self._read(request)
        given, found = request.prompt_adapter_num_virtual_tokens, adapter.num_virtual_tokens
        if given not in (0, found):
            raise FieldValueError(
                "prompt_adapter_num_virtual_tokens",
                f"={given}, but the prompt adapter {quoted(request.name)} has {found} virtual tokens",
            )
        return adapter

    def named(self, options: Sequence[str], taken: Sequence[str]) -> dict[str, PromptAdapterRequest]:
        """The adapters that a server's options give as NAME=FOLDER, by name. taken: names that they must not have.

        Raises:
            ValueError: an option is malformed, a name is given twice, or an adapter cannot be served.
        """
        requests: dict[str, PromptAdapterRequest] = {}
        for number, option in enumerate(options, 1):
            name, found, folder = option.partition("=")
            if not (name and found and folder):
                raise ValueError(f"prompt_adapters must be NAME=FOLDER, got {quoted(option)}")
            if name in requests or name in taken:
                raise ValueError(f"prompt_adapters: the name {quoted(name)} is given twice")
            request = PromptAdapterRequest(name, number, folder)
            requests[name] = msgspec.structs.replace(
                request, prompt_adapter_num_virtual_tokens=self.get(request).num_virtual_tokens
            )
        return requests

    def _read(self, request: PromptAdapterRequest) -> PromptAdapter:
        folder = Path(request.prompt_adapter_local_path)
        key: tuple[Any, ...]
        try:
            key = (str(folder), *(signature(folder / name) for name in (CONFIG, WEIGHTS)))
        except OSError:
            key = (str(folder), None)
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        try:
            embeddings = read_adapter(folder, self._info)
        except (ValueError, OSError) as error:
            raise ValueError(f"the prompt adapter {quoted(request.name)} cannot be used: {error}") from error
        adapter = PromptAdapter(tuple(media_of(embeddings)), embeddings.shape[0])
        with self._lock:
            self._kept[key] = adapter
            while len(self._kept) > self._info.max_adapters:
                self._kept.popitem(last=False)
        return adapter


def signature(path: Path) -> tuple[int, int, int]:
    """A value that changes when a file is replaced or written. Raises OSError."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_adapter(folder: Path, info: EmbeddingsInfo) -> Tensor:
    """The embeddings [number of virtual tokens, E] of an adapter, checked.

    Raises:
        ValueError: it is none that can be served. OSError: a file cannot be read.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"there is no {CONFIG} in {str(folder)!r}")
    config = read_json(folder / CONFIG)
    check_prompt_config(config)
    path = folder / WEIGHTS
    if not path.is_file():
        reason = f"there is no {WEIGHTS} in {str(folder)!r}"
        if (folder / PICKLE).is_file():
            reason += f"; {PICKLE} is a pickle, which can run code and is not read: save it with PEFT again"
        raise ValueError(reason)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{WEIGHTS} is over {MAX_FILE_BYTES} bytes")
    tensors = read_tensors(WEIGHTS, path.read_bytes())
    if others := sorted(set(tensors) - {TENSOR}):
        raise ValueError(f"{WEIGHTS} has other weights than {TENSOR}: {quoted(others)}")
    if TENSOR not in tensors:
        raise ValueError(f"{WEIGHTS} has no {TENSOR}")
    embeddings = tensors[TENSOR]
    check_embeddings(TENSOR, embeddings, info.size)
    num_tokens, most = embeddings.shape[0], info.max_adapter_tokens
    if config.get("num_virtual_tokens") not in (None, num_tokens):
        raise ValueError(
            f"it has {num_tokens} virtual tokens, but {CONFIG} says {quoted(config['num_virtual_tokens'])}"
        )
    if most and num_tokens > most:
        raise ValueError(f"its {num_tokens} virtual tokens are over max_prompt_adapter_token={most}")
    return embeddings


def check_prompt_config(config: dict[str, Any]) -> None:
    """Check that the settings of an adapter are those of embeddings before a prompt; raises ValueError."""
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind not in LEARNED_PROMPTS:
        reason = (
            OTHER_KINDS.get(kind, "it is no prompt adapter") if isinstance(kind, str) else "it has no type"
        )
        raise ValueError(f"peft_type {quoted(kind)}: {reason}")
    if task not in TASKS:
        raise ValueError(f"task_type {quoted(task)}: only adapters that generate text (CAUSAL_LM) are served")
    if config.get("num_transformer_submodules") not in (None, 1):
        raise ValueError("it has embeddings for an encoder and a decoder, and this model is a decoder")
