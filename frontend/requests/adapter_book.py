"""Finds the files of LoRA adapters, and the tokenizers of those that have their own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from pagewire.frontend.requests.lora import LoRARequest, UsedAdapter
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.bounds import convert_value
from pagewire.ipc.digest import sha256_of
from pagewire.ipc.errors import FieldTypeError, FieldValueError
from pagewire.ipc.files.adapter_files import adapter_folder, adapter_version
from pagewire.ipc.files.hub import TOKENIZER_FILES, read_file
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.messages import EngineInfo

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a folder without any has no tokenizer
NOT_TOKENIZERS = {"config.json", "generation_config.json"}
MAX_FOLDERS = 10_000  # adapters whose folders a session remembers
MAX_TOKENIZERS = 32  # in memory, the model's included; each may take tens of megabytes


class AdapterBook:
    """Finds the files of adapters for a session, and keeps their tokenizers. Thread-safe.

    info: of the engine. token, cache_dir: for the hub.
    """

    def __init__(
        self, info: EngineInfo, token: str | bool | None = None, cache_dir: str | None = None
    ) -> None:
        self._info, self._token, self._cache_dir = info, token, cache_dir
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}  # by path or repository
        self._digests: dict[tuple[str, str], bytes] = {}  # of tokenizers, by path and version of the adapter
        self._tokenizers: dict[bytes, Tokenizer | None] = {b"": None}  # adapters often have the model's
        self._own_digest: bytes | None = None  # of the model's tokenizer, once it was needed

    def use(self, lora_request: LoRARequest) -> UsedAdapter:
        """The adapter of a request. The first time that takes a while: see `knows`.

        Raises:
            ValueError: the engine serves no adapters, or there is none at this path (`ModelNotFoundError`), or its
                tokenizer has more tokens than adapters may add. TypeError: it is no `LoRARequest`.
        """
        source = self.source(lora_request)
        tokenizer = self._tokenizer(source) if source.path else None
        return UsedAdapter(lora_request, source, tokenizer, self._num_extra_tokens)

    def knows(self, lora_request: LoRARequest) -> bool:
        """True if `use` has nothing to download or load."""
        if not isinstance(lora_request, LoRARequest) or not lora_request.lora_path:
            return True
        with self._lock:
            folder = self._folders.get(lora_request.lora_path)
            digest = None if folder is None else self._digests.get((str(folder), adapter_version(folder)))
            return digest in self._tokenizers

    def source(self, lora_request: LoRARequest) -> AdapterSource:
        """The name and place of an adapter, as the core gets them. Raises: as `use`."""
        if not isinstance(lora_request, LoRARequest):
            raise FieldTypeError("lora_request", f"must be a LoRARequest, got {type(lora_request).__name__}")
        if self._info.lora is None:
            raise FieldValueError(
                "lora_request", ": this engine serves no adapters: start it with enable_lora=True"
            )
        base, names = lora_request.base_model_name, {*self._info.served_model_names, self._info.model}
        if base is not None and base not in names:
            raise FieldValueError(
                "lora_request", f"is for the model {base!r}, but this engine serves {sorted(names)}"
            )
        path, version = "", ""
        if lora_request.lora_path:
            folder = self._folder(lora_request.lora_path)
            path, version = str(folder), adapter_version(folder)
        fields = (lora_request.lora_name, lora_request.lora_int_id, path, version)
        source: AdapterSource = convert_value("lora_request", fields, AdapterSource)
        return source

    @property
    def _num_extra_tokens(self) -> int:
        return 0 if self._info.lora is None else self._info.lora.extra_vocab_size

    def _folder(self, name: str) -> Path:
        with self._lock:
            folder = self._folders.get(name)
        if folder is None or not folder.is_dir():
            folder = adapter_folder(name, token=self._token, cache_dir=self._cache_dir)
            with self._lock:
                forget_oldest(self._folders)
                self._folders[name] = folder
        return folder

    def _tokenizer(self, source: AdapterSource) -> Tokenizer | None:
        """The adapter's own tokenizer; None if it has none but the model's."""
        key, folder = (source.path, source.version), Path(source.path)
        with self._lock:
            digest = self._digests.get(key)
        if digest is None:
            digest = b"" if self._info.skip_tokenizer_init else self._digest(folder)
            with self._lock:
                forget_oldest(self._digests)
                self._digests[key] = digest
        with self._lock:
            if digest in self._tokenizers:
                return self._tokenizers[digest]
        tokenizer = self._load_tokenizer(folder)
        with self._lock:
            self._tokenizers[digest] = tokenizer
            if len(self._tokenizers) > MAX_TOKENIZERS:
                del self._tokenizers[next(filter(None, self._tokenizers))]  # the oldest, but not the model's
        return tokenizer

    def _digest(self, folder: Path) -> bytes:
        """A digest of a folder's tokenizer; empty if it has none, or the model's."""
        if not (digest := tokenizer_digest(folder)):
            return b""
        if self._own_digest is None:
            self._own_digest = tokenizer_digest(Path(self._info.tokenizer))
        return b"" if digest == self._own_digest else digest

    def _load_tokenizer(self, folder: Path) -> Tokenizer:
        tokenizer = load_tokenizer(folder, self._info.tokenizer_mode)
        if tokenizer.vocab_size > self._info.vocab_size + self._num_extra_tokens:
            raise ValueError(
                f"the tokenizer of the adapter in {folder} has {tokenizer.vocab_size} tokens, the model "
                f"{self._info.vocab_size}, and an adapter may add {self._num_extra_tokens} (lora_extra_vocab_size)"
            )
        return tokenizer


def forget_oldest(table: dict[Any, Any]) -> None:
    """Forget the oldest entry of a table that is full."""
    if len(table) >= MAX_FOLDERS:
        del table[next(iter(table))]


def tokenizer_digest(folder: Path) -> bytes:
    """A digest of the files of a folder's tokenizer; empty if it has none.

    Raises:
        ValueError: a file is too large, or no regular file.
    """
    if not any((folder / name).is_file() for name in VOCABULARIES):
        return b""
    return sha256_of(
        str(path.relative_to(folder)).encode() + b"\0" + read_file(path)
        for path in sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)})
        if path.name not in NOT_TOKENIZERS and path.is_file()
    )
