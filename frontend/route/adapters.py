"""The adapters that were registered at a router, and which of its cores have them.

    register_adapter --> all cores that are up --> kept here
                                                       |  one after the other
    a core that joins or comes back <-- register_adapter

A core gets no request for an adapter that it could not load. Before it has answered, it gets one only if no other
core has the adapter. The request then names the adapter's folder, with which it waits on the core for the adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import RLock
from typing import Any

import msgspec

from pagewire.frontend.client import CoreClient
from pagewire.frontend.route.replica import Replica
from pagewire.ipc.errors import EngineBusyError, EngineDeadError
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.messages import Request

logger = logging.getLogger("pagewire.route")


class RouterAdapters:
    """Adapters by name, which cores that join are given.

    lock: the fleet's; it is held where `equip`, `able` and `addressed` are called. up: the cores that get requests.
    """

    def __init__(self, lock: RLock, up: Callable[[], Iterable[Replica]]) -> None:
        self._lock, self._up = lock, up
        self._sources: dict[str, AdapterSource] = {}
        self._asked: dict[int, CoreClient] = {}  # by core, the client whose answer is waited for

    # -------------------------------------------------------------- calls

    def called(
        self, method: str, args: Sequence[Any], calls: Mapping[int, Future[Any]], answer: Future[Any]
    ) -> None:
        """Take note of a call to all cores. calls: by core. answer: of all of them, once it has come."""
        if method == "register_adapter":
            answer.add_done_callback(partial(self._registered, AdapterSource(*args), calls.keys()))
        elif method == "remove_lora":
            with self._lock:
                kept = self._sources.items()
                self._sources = {name: source for name, source in kept if source.adapter_id != args[0]}

    def _registered(self, source: AdapterSource, cores: Iterable[int], answer: Future[Any]) -> None:
        """Keep an adapter that the cores have loaded; others have joined meanwhile."""
        if answer.cancelled() or answer.exception() is not None:
            return
        with self._lock:
            self._sources[source.name] = source
            for replica in self._up():
                replica.adapters.pop(source.name, None)
                if replica.number in cores:
                    replica.adapters[source.name] = None
                self._ask(replica)

    # -------------------------------------------------------------- cores that join

    def equip(self, replica: Replica) -> None:
        """Register the adapters with a core that has joined, or that was replaced."""
        replica.adapters.clear()
        self._asked.pop(replica.number, None)
        self._ask(replica)

    def _ask(self, replica: Replica) -> None:
        """Register the next adapter that a core was not given yet. A core reads one at a time, beside its steps."""
        if replica.number in self._asked:
            return
        source = next((each for name, each in self._sources.items() if name not in replica.adapters), None)
        if source is None:
            return
        client = self._asked[replica.number] = replica.client
        try:
            fields = (source.name, source.adapter_id, source.path, source.version)
            answer = client.call("register_adapter", *fields)
        except (EngineDeadError, EngineBusyError):  # it is lost, or about to be: it reads nothing
            del self._asked[replica.number]
            return
        answer.add_done_callback(partial(self._answered, replica, client, source))

    def _answered(
        self, replica: Replica, client: CoreClient, source: AdapterSource, answer: Future[Any]
    ) -> None:
        error = answer.exception()
        with self._lock:
            if self._asked.get(replica.number) is not client:
                return  # another core is there by now
            del self._asked[replica.number]
            if isinstance(error, EngineDeadError):
                return
            if self._sources.get(source.name) is source:
                replica.adapters[source.name] = error  # type: ignore[assignment]
                if error is not None:
                    text = "core %d (%s): its requests for the adapter %.100r go elsewhere: %s"
                    logger.warning(text, replica.number, replica.place.label, source.name, error)
            self._ask(replica)

    # -------------------------------------------------------------- requests

    def able(self, request: Request, replicas: Sequence[Replica]) -> list[Replica]:
        """Those of the cores that may get a request: all, unless it names an adapter that was registered here.

        Raises:
            EngineBusyError: there are cores, but none of them could load the adapter.
        """
        name = "" if request.adapter is None else request.adapter.name
        if name not in self._sources or not replicas:
            return list(replicas)
        loaded = [each for each in replicas if name in each.adapters and each.adapters[name] is None]
        able = loaded or [each for each in replicas if name not in each.adapters]
        if not able:
            problem = next(error for each in replicas if (error := each.adapters[name]) is not None)
            raise EngineBusyError(f"no engine core that is up could load the adapter {name!r}: {problem}")
        return able

    def addressed(self, request: Request, replica: Replica) -> Request:
        """A request for a core, which names the folder of its adapter if that is not registered there yet."""
        named = request.adapter
        source = None if named is None or named.path else self._sources.get(named.name)
        if named is None or source is None or replica.adapters.get(source.name, source) is None:
            return request
        named = AdapterSource(named.name, named.adapter_id, source.path, source.version)
        return msgspec.structs.replace(request, adapter=named)
