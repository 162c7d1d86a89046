"""The LoRA adapters that a server offers as models."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pagewire.frontend.client import AsyncLLM, LoRARequest
from pagewire.frontend.server.http.errors import APIError
from pagewire.ipc.bounds import unknown_name
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.lora import ADAPTER_FILES, MAX_ADAPTER_ID, AdapterName

logger = logging.getLogger("pagewire.server")

LIST_SECONDS = 30.0  # for the core to list its adapters, when the server starts


class Module(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter in `--lora-modules`, given as name=path or as JSON of these fields."""

    name: AdapterName
    path: str
    base_model_name: str | None = None


def modules_of(specs: Iterable[str]) -> list[Module]:
    """The adapters in the values of `--lora-modules`.

    Raises:
        ValueError: one is neither name=path nor JSON, or two have the same name.
    """
    modules: dict[str, Module] = {}
    for spec in specs:
        module = module_of(spec)
        if module.name in modules:
            raise ValueError(f"lora_modules: two adapters are called {module.name!r}")
        modules[module.name] = module
    return list(modules.values())


def module_of(spec: str) -> Module:
    """The adapter in one value of `--lora-modules`. Raises ValueError."""
    if spec.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(spec, type=Module)
        except msgspec.MsgspecError as error:
            raise ValueError(f"lora_modules: {quoted(spec)}: {error}") from None
    name, separator, path = spec.partition("=")
    if not (name and separator and path):
        raise ValueError(f"lora_modules: give name=path or JSON, not {quoted(spec)}")
    return Module(name, path)


class ServedAdapters:
    """Adapters by the name under which clients address them.

    engine: which serves them. taken: names of the model and of prompt adapters, which no adapter may have.
    root: the folder below which operators may load adapters; None: they may load none.

    Raises:
        ValueError: `root` is no folder.
    """

    def __init__(self, engine: AsyncLLM, taken: Iterable[str], root: str | None = None) -> None:
        self._engine, self._taken = engine, frozenset(taken)
        self._root = None if root is None else Path(root).resolve()
        if self._root is not None and not self._root.is_dir():
            raise ValueError(f"lora_root: {root} is not a folder")
        self._requests: dict[str, LoRARequest] = {}
        self._loading: set[str] = set()

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter(self._requests.values())

    def get(self, name: str) -> LoRARequest | None:
        """The adapter with this name; None if there is none."""
        return self._requests.get(name)

    def start(self, modules: Iterable[Module]) -> None:
        """Offer the adapters that the engine has already, and add `modules` to it. Called before the server serves.

        Raises:
            ValueError, PermissionError: one cannot be added.
        """
        modules = list(modules)
        if self._engine.info.lora is None:
            if modules:
                raise ValueError("lora_modules: this engine serves no adapters: start it with --enable-lora")
            return
        session = self._engine.session
        try:
            entries = session.call("adapters").result(LIST_SECONDS)
        except PermissionError as error:
            logger.warning("adapters that the engine has already are not offered: %s", error)
            entries = []
        for entry in entries:
            if entry["name"] not in self._taken:
                self._requests[entry["name"]] = LoRARequest(entry["name"], entry["adapter_id"])
        requests = [self._request(module.name, module.path, module.base_model_name) for module in modules]
        for request, answer in [(request, session.add_lora(request)) for request in requests]:
            session.intake.tokenizer_for(request)
            answer.result()
            self._requests[request.lora_name] = request

    async def load(self, name: str, path: str, replace: bool) -> LoRARequest:
        """Add an adapter from below the root folder, once it was read. replace: one of this name is replaced.

        Raises:
            APIError: the name is taken, or the path is not below the root. ValueError: it cannot be read.
        """
        if not replace and (name in self._requests or name in self._loading):
            raise APIError(
                400,
                f"there is an adapter {quoted(name)}: unload it first",
                param="lora_name",
                code="name_taken",
            )
        request = self._request(name, str(self._below_root(path)))
        self._loading.add(name)
        try:
            await self._engine.get_tokenizer(request)  # loaded before the first request needs it
            await self._engine.add_lora(request)
        finally:
            self._loading.discard(name)
        self._requests[name] = request
        return request

    async def unload(self, name: str) -> None:
        """Withdraw an adapter: its requests finish, then it leaves memory.

        Raises:
            APIError: there is none with this name.
        """
        request = self._requests.pop(name, None)
        if request is None:
            message = unknown_name("adapter", name, list(self._requests))
            raise APIError(404, message, param="lora_name", code="model_not_found")
        await self._engine.remove_lora(request.lora_int_id)

    def _request(self, name: str, path: str, base_model_name: str | None = None) -> LoRARequest:
        if name in self._taken:
            raise ValueError(
                f"{name!r} is a name of the model or of a prompt adapter: give the adapter another one"
            )
        return LoRARequest(name, id_of(name), path, base_model_name=base_model_name)

    def _below_root(self, path: str) -> Path:
        """The folder that `path` means below the root; links are followed first.

        Raises:
            APIError: it is not below the root, or one of its files is not, or there is no root.
        """
        if self._root is None:
            raise APIError(400, "the server was started without --lora-root: no adapters can be loaded")
        try:
            folder = (self._root / path).resolve()
            files = [(folder / name).resolve() for name in ADAPTER_FILES]
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a circle of links
            raise APIError(
                400, f"lora_path: {quoted(path)} is no path ({error})", param="lora_path"
            ) from None
        if not all(file.is_relative_to(self._root) for file in (folder, *files)):
            message = f"lora_path: {quoted(path)} is not below the server's folder of adapters (--lora-root)"
            raise APIError(403, message, param="lora_path", code="path_not_allowed")
        return folder


def id_of(name: str) -> int:
    """The id of a server's adapter, which follows from its name: servers of one engine must agree."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % MAX_ADAPTER_ID + 1
