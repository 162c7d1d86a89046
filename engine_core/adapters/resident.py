"""The LoRA adapters that the workers have in memory or read, and the messages by which that changes.

    ABSENT --LoadAdapter--> LOADING --AdapterLoaded--> RESIDENT --DropAdapter--> ABSENT
       ^                       |                          |
       +---- workers lost -----+--------------------------+

Workers may die of an adapter that they read, or hang in it. One that was being read when they were lost is suspect:
the next workers read it alone, with no other adapter and no step beside it. If these are lost, too, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeAlias

from pagewire.engine_core.adapters.adapter import Adapter, AdapterLimits, Residence
from pagewire.ipc.suspicion import ADAPTER_RULE
from pagewire.ipc.wire.lora import AdapterLoaded, DropAdapter, LoadAdapter

MAX_LOADING = 2  # so that the workers read the next adapter as soon as they have the last
LOAD_SECONDS = 300.0  # that the workers may take to read one, before its requests wait no longer
TRIAL_SECONDS = 10.0  # that steps wait for a suspect while the workers give signs of life, as on a slow disk

Command: TypeAlias = LoadAdapter | DropAdapter


class ResidentAdapters:
    """What the workers have, or are to have as soon as they have taken the messages. Pure: no IO, no clock.

    Attributes:
        num_loads: adapters that the workers have read.
    """

    def __init__(self, limits: AdapterLimits) -> None:
        self.num_loads = 0
        self._limits = limits
        self._held: dict[int, Adapter] = {}  # loading or resident, the least recently used first
        self._commands: list[Command] = []
        self._indices = count(1)
        self._trial: Adapter | None = None  # the suspect that is read next, or the last one that was

    @property
    def resident(self) -> list[Adapter]:
        """The adapters in the workers' memory, the least recently used first."""
        return [adapter for adapter in self._held.values() if adapter.resident]

    @property
    def loading(self) -> list[Adapter]:
        """The adapters that the workers read now."""
        return [adapter for adapter in self._held.values() if adapter.residence is Residence.LOADING]

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in the workers' memory."""
        return sum(adapter.num_bytes for adapter in self._held.values())

    @property
    def is_over(self) -> bool:
        """True if they take more than they may: their sizes are known once they have been read."""
        return self.num_bytes > self._limits.max_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether there is room for one more. num_bytes: that it takes; 0 if that is not known."""
        fits = self.num_bytes + max(1, num_bytes) <= self._limits.max_bytes
        return fits and len(self._held) < self._limits.max_resident

    def may_read(self, adapter: Adapter) -> bool:
        """Whether the workers may read one more, beside those that they read: a suspect is read alone."""
        loading = self.loading
        if loading and (adapter.suspect or loading[0].suspect):
            return False
        return len(loading) < MAX_LOADING

    # ------------------------------------------------------------ changes

    def commands(
        self, wanted: Iterable[Adapter], make_room: Callable[[Adapter], bool], now: float, *, idle: bool
    ) -> list[Command]:
        """The messages that are due for the workers, which must be ready.

        wanted: adapters to read, in order. make_room: drops others for one; False: that is not enough.
        idle: no step is in flight.
        """
        if self._trial is not None and self._trial.residence is not Residence.LOADING:
            self._trial = None
        for adapter in wanted:
            if not (self.may_read(adapter) and make_room(adapter)):
                break  # what comes behind it could take even less
            if adapter.suspect:
                self._trial = adapter
                if not idle:
                    break  # `holds_steps` until the last one is over
            adapter.residence, adapter.index = Residence.LOADING, next(self._indices)
            adapter.loading_since = now
            self._held[adapter.index] = adapter
            self._commands.append(LoadAdapter(adapter.index, adapter.source.path, adapter.content))
        commands, self._commands = self._commands, []
        return commands

    def find(self, index: int) -> Adapter | None:
        """The adapter that is being read under this index; None if it was dropped meanwhile."""
        adapter = self._held.get(index)
        return None if adapter is None or adapter.resident else adapter

    def keep(self, adapter: Adapter, message: AdapterLoaded) -> None:
        """Record that the workers have an adapter, and what they say of it."""
        adapter.residence, adapter.content = Residence.RESIDENT, message.content
        adapter.num_bytes, adapter.rank = message.num_bytes, message.rank
        adapter.num_extra_tokens = message.num_extra_tokens
        self.num_loads += 1

    def drop(self, adapter: Adapter) -> None:
        """Let the workers drop an adapter, read or not: of one that failed, some ranks may have it."""
        self._commands.append(DropAdapter(adapter.index))
        del self._held[adapter.index]
        adapter.residence, adapter.index = Residence.ABSENT, 0

    def touch(self, adapter: Adapter) -> None:
        """Count an adapter as the most recently used."""
        self._held[adapter.index] = self._held.pop(adapter.index)

    def clear(self) -> None:
        """Forget all: the workers are lost."""
        for adapter in self._held.values():
            adapter.residence, adapter.index = Residence.ABSENT, 0
        self._held, self._commands = {}, []

    # ------------------------------------------------------------ failures

    def late(self, now: float) -> list[Adapter]:
        """The adapters that take the workers too long, as on a disk that does not answer."""
        return [adapter for adapter in self.loading if now - adapter.loading_since > LOAD_SECONDS]

    def holds_steps(self, last_message: float) -> bool:
        """True while no step may be launched, since a suspect is read alone.

        last_message: monotonic time of the workers' last one. Those that hang send none, and would run no step.
        """
        suspect = self._trial
        if suspect is None or suspect.resident:
            return False
        is_read = suspect.residence is Residence.LOADING
        return not is_read or last_message - suspect.loading_since <= TRIAL_SECONDS

    def blame(self, last_message: float) -> list[Adapter]:
        """Suspect the adapters that lost workers were reading; returns those that are refused from now on.

        last_message: as of `holds_steps`.
        """
        loading = self.loading
        alone = self._trial if self.holds_steps(last_message) else None
        for adapter in loading:
            adapter.suspicion = adapter.suspicion.after_crash(alone=adapter is alone)
            if adapter.suspicion.is_guilty(ADAPTER_RULE):
                adapter.refusal = (
                    f"adapter {adapter.source.name!r}: {adapter.suspicion.num_in_all} workers were lost while they "
                    "read it; it is not read again until its files change, or it is removed and added again"
                )
        return [adapter for adapter in loading if adapter.refusal]
