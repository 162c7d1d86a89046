"""The calls that register, unload, pin and list LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagewire.engine_core.adapters.table import AdapterTable
from pagewire.engine_core.calls.frontend_call import FrontendCall
from pagewire.engine_core.clients.access import may_name_paths
from pagewire.engine_core.metrics import reports
from pagewire.engine_core.metrics.reports import ReportedEngine
from pagewire.ipc.wire.lora import AdapterSource


class AdapterControl:
    """Runs the calls of adapters; each raises ValueError if the engine serves none."""

    def __init__(self, core: ReportedEngine) -> None:
        self._core = core

    def register_adapter(
        self, caller: FrontendCall, name: str, adapter_id: int, path: str, version: str
    ) -> None:
        """Read an adapter, and register it under its name; answers True once that is done.

        Raises:
            ValueError: no adapters are served, it has no path, or its id is that of another name.
            PermissionError: this frontend may not name paths.
        """
        client = self._core.clients.attached[caller.identity]
        if not may_name_paths(client.peer, client.rights):
            raise PermissionError(
                "only frontends of the engine's own user that attach over ipc:// may name the paths of adapters"
            )
        if not path:
            raise ValueError("register_adapter: give the path of the adapter's folder")
        source = AdapterSource(name, adapter_id, path, version)
        self._adapters().register(source, time.monotonic(), self._answer_when_resident(caller))

    def remove_lora(self, caller: FrontendCall, lora_id: int) -> None:
        """Unload an adapter once its requests have ended; answers whether there is one with this id."""
        caller.reply(self._adapters().remove(lora_id))

    def pin_lora(self, caller: FrontendCall, lora_id: int) -> None:
        """Keep an adapter in memory; answers True once it is there."""
        self._adapters().pin(lora_id, time.monotonic(), self._answer_when_resident(caller))

    def list_loras(self, caller: FrontendCall) -> None:
        """Answer the ids of the adapters that are registered or in memory."""
        caller.reply(self._adapters().ids())

    def adapters(self, caller: FrontendCall) -> None:
        """Answer the registered adapters."""
        caller.reply(reports.adapters(self._adapters()))

    def _adapters(self) -> AdapterTable:
        if self._core.adapters is None:
            raise ValueError("this engine serves no adapters: start it with enable_lora")
        return self._core.adapters

    def _answer_when_resident(self, caller: FrontendCall) -> Callable[[Exception | None], None]:
        def done(error: Exception | None) -> None:
            if error is None:
                caller.reply(True)
            else:
                caller.refuse(error)

        return done
