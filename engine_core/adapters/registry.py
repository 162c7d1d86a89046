"""The LoRA adapters that the core knows, and the names under which they are registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pagewire.engine_core.adapters.adapter import Adapter, key_of
from pagewire.ipc.wire.lora import AdapterSource

MAX_REGISTERED = 100_000


class AdapterRegistry:
    """Adapters by path and version: one folder with the same files is one adapter, under whatever names.

    Attributes:
        named: sources by name, which requests may name without a path.
    """

    def __init__(self) -> None:
        self.named: dict[str, AdapterSource] = {}
        self._known: dict[tuple[str, str], Adapter] = {}
        self._num_names: Counter[tuple[str, str]] = Counter()  # by the key of the adapter

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._known.values()))

    def of(self, source: AdapterSource) -> Adapter:
        """The adapter of a source, which is known from now on."""
        return self.know(Adapter(source))

    def know(self, adapter: Adapter) -> Adapter:
        """Know an adapter; returns the one with the same path and version if that is known already."""
        return self._known.setdefault(adapter.key, adapter)

    def forget(self, adapter: Adapter) -> None:
        """Forget an adapter without a name."""
        self._known.pop(adapter.key, None)

    def is_named(self, adapter: Adapter) -> bool:
        """True if an adapter is registered under a name."""
        return adapter.key in self._num_names

    def find(self, source: AdapterSource, *, any_path: bool) -> Adapter:
        """The adapter that a request names. any_path: it may be one that is not registered.

        Raises:
            ValueError: no adapter is registered under this name. PermissionError: another path needs `any_path`.
        """
        registered = self.named.get(source.name)
        if not source.path or (not any_path and registered is not None and source.path == registered.path):
            if registered is None:
                raise ValueError(f"no adapter is registered as {source.name!r}: add it, or give its path")
            return self._known[key_of(registered)]
        if not any_path:
            raise PermissionError(
                f"the adapter {source.name!r} is not registered: only frontends of the engine's own user that "
                "attach over ipc:// and have the right 'control' may name others"
            )
        return self._known.get(key_of(source)) or Adapter(source)

    def with_id(self, adapter_id: int) -> Adapter | None:
        """The adapter with this id, or that is registered with it; None if there is none, or it was removed."""
        named = {key_of(source) for source in self.named.values() if source.adapter_id == adapter_id}
        for adapter in self:
            if not adapter.retired and (adapter.source.adapter_id == adapter_id or adapter.key in named):
                return adapter
        return None

    def check_new(self, source: AdapterSource) -> None:
        """Check that a source can be registered.

        Raises:
            ValueError: its id is that of another name, or there are too many.
        """
        for other in self.named.values():
            if other.adapter_id == source.adapter_id and other.name != source.name:
                raise ValueError(
                    f"the adapter id {source.adapter_id} is that of {other.name!r}: give {source.name!r} another"
                )
        if len(self.named) >= MAX_REGISTERED:
            raise ValueError(f"{MAX_REGISTERED} adapters are registered, which is the limit")

    def name(self, source: AdapterSource) -> list[Adapter]:
        """Give an adapter its name; returns the one that has lost its last name by that."""
        old, self.named[source.name] = self.named.get(source.name), source
        self._num_names[key_of(source)] += 1
        return [] if old is None else self._unname(old)

    def remove(self, adapter_id: int) -> tuple[bool, list[Adapter]]:
        """Remove the names with this id: whether there are any, and the adapters that have lost their last one."""
        removed = [source for source in self.named.values() if source.adapter_id == adapter_id]
        nameless = []
        for source in removed:
            del self.named[source.name]
            nameless += self._unname(source)
        return bool(removed), nameless

    def _unname(self, source: AdapterSource) -> list[Adapter]:
        key = key_of(source)
        self._num_names[key] -= 1
        if self._num_names[key]:
            return []
        del self._num_names[key]
        return [self._known[key]]
