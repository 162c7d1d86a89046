"""Which LoRA adapters the workers have in memory, and when the sequences that wait for one may be scheduled.

    enter(sequence) -> waiting -> [LoadAdapter -> AdapterLoaded] -> admit() -> Scheduler.add -> ended(sequence)

An adapter is read when a request wants it, and stays in memory until room is needed: the least recently used goes
first. One whose sequences are scheduled is never dropped, so whatever the scheduler plans is resident. The workers
read beside their steps; only the sequences that want the adapter wait for it.

An adapter's bytes are known once it has been read. So no further one is loaded while those in memory take
`max_bytes`, and what is idle goes as soon as they take more; by so much, an adapter or two may exceed the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pagewire.engine_core.adapters.adapter import Adapter, AdapterLimits, Residence, adapter_of
from pagewire.engine_core.adapters.queue import AdapterQueue, name_of
from pagewire.engine_core.adapters.registry import AdapterRegistry
from pagewire.engine_core.adapters.resident import LOAD_SECONDS, Command, ResidentAdapters
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.errors import AdapterCrashedWorkerError
from pagewire.ipc.suspicion import NO_SUSPICION
from pagewire.ipc.wire.lora import AdapterLoaded, AdapterSource

Refusal: TypeAlias = tuple[Sequence, Exception]


class AdapterTable:
    """The adapters that are registered, resident or wanted. Pure, as the scheduler is: no IO, no clock.

    Whenever something that may need an adapter is over, `_settle` decides by the adapter's state alone whether it
    stays: in the queue, in the workers' memory, and known.

    Attributes:
        queue: the sequences, and whose turn it is. memory: what the workers have, and read. registry: what is known
            by name or path.
    """

    def __init__(self, limits: AdapterLimits) -> None:
        self.limits = limits
        self.memory = ResidentAdapters(limits)
        self.registry = AdapterRegistry()
        self.queue = AdapterQueue(limits.max_active)

    def ids(self) -> list[int]:
        """The ids of the adapters that are registered or resident."""
        return sorted(
            {source.adapter_id for source in self.registry.named.values()}
            | {adapter.source.adapter_id for adapter in self.memory.resident}
        )

    # ------------------------------------------------------------ registering

    def register(self, source: AdapterSource, now: float, done: Callable[[Exception | None], None]) -> None:
        """Read an adapter, and give it its name once that has succeeded; then `done` gets None, or else the error.

        An adapter of the same name is replaced; its requests finish with the old one.

        Raises:
            ValueError: its id is that of another name, or there are too many.
        """
        self.registry.check_new(source)

        def name() -> None:
            self.registry.check_new(source)
            self._name(source, adapter)

        adapter = self.registry.of(source)
        self._when_resident(adapter, name, now, done)

    def preload(self, source: AdapterSource, now: float, done: Callable[[Exception | None], None]) -> None:
        """Register an adapter at once, read it and keep it in memory. `done`: as of `register`."""

        def pin() -> None:
            adapter.pinned = self.limits.max_resident > 1

        adapter = self.registry.of(source)
        self._name(source, adapter)
        self._when_resident(adapter, pin, now, done)

    def remove(self, adapter_id: int) -> bool:
        """Forget an adapter: it leaves memory with its last request. False if there is none with this id."""
        found, nameless = self.registry.remove(adapter_id)
        for adapter in nameless:
            self._retire(adapter)
        for adapter in self.registry:
            if adapter.source.adapter_id == adapter_id and not self.registry.is_named(adapter):
                found = found or not adapter.retired
                self._retire(adapter)
        return found

    def pin(self, adapter_id: int, now: float, done: Callable[[Exception | None], None]) -> None:
        """Keep an adapter in memory; `done` gets None once it is there, or else the error.

        Raises:
            ValueError: there is none with this id, or the others would have no room.
        """
        adapter = self.registry.with_id(adapter_id)
        if adapter is None:
            raise ValueError(f"no adapter has the id {adapter_id}: add it first")
        self._check_pin(adapter)

        def pin() -> None:
            self._check_pin(adapter)
            adapter.pinned = True

        self._when_resident(adapter, pin, now, done)

    def _when_resident(
        self,
        adapter: Adapter,
        act: Callable[[], None],
        now: float,
        done: Callable[[Exception | None], None],
    ) -> None:
        """Call `act` once the workers have an adapter, then `done` with None, or with the error of either."""

        def answered(error: Exception | None) -> None:
            if error is None:
                try:
                    act()
                except ValueError as problem:
                    error = problem
            done(error)

        if adapter.resident:
            answered(None)
        elif adapter.refusal:
            answered(AdapterCrashedWorkerError(adapter.refusal))
        else:
            adapter.callers.append(answered)
            self.queue.want(adapter, now)

    def _name(self, source: AdapterSource, adapter: Adapter) -> None:
        adapter.retired = False
        for nameless in self.registry.name(source):
            self._retire(nameless)

    def _check_pin(self, adapter: Adapter) -> None:
        pinned = [other for other in self.registry if other.pinned and other is not adapter]
        if len(pinned) + 2 > self.limits.max_resident:
            raise ValueError(
                f"{len(pinned)} adapters are pinned, and of {self.limits.max_resident} (max_cpu_loras) one must "
                "be left for others"
            )
        if adapter.num_bytes + sum(other.num_bytes for other in pinned) >= self.limits.max_bytes:
            raise ValueError("pinned adapters would take all memory that adapters may take (max_lora_bytes)")

    def _retire(self, adapter: Adapter) -> None:
        adapter.retired, adapter.pinned = True, False
        self._settle(adapter)

    # ------------------------------------------------------------ sequences

    def enter(self, sequence: Sequence, now: float) -> None:
        """Let a sequence wait for its adapter, until `admit` returns it."""
        named = adapter_of(sequence)
        assert named is not None
        adapter = sequence.adapter = self.registry.know(named)
        if sequence.request.adapter is not None and sequence.request.adapter.path:
            adapter.retired = False  # it is used again
        self.queue.add(sequence, adapter, now)

    def drop(self, sequence: Sequence) -> bool:
        """Take a sequence out of those that wait; False if it is none of them."""
        adapter = adapter_of(sequence)
        if adapter is None or not self.queue.remove(sequence):
            return False
        self._settle(adapter)
        return True

    def admit(self, now: float) -> tuple[list[Sequence], list[Refusal]]:
        """The sequences that may be scheduled from now on, in order; and those that cannot run, with the reason."""
        admitted: list[Sequence] = []
        refused: list[Refusal] = []
        turns = self.queue.turns(now, self.memory.may_read)
        for adapter in list(self.queue.waiting):
            if adapter.refusal:
                refused += self._refuse(adapter, AdapterCrashedWorkerError(adapter.refusal))
            if not adapter.resident:
                continue
            if self.queue.waiting[adapter] and self.queue.may_run(adapter, turns):
                for sequence in self.queue.take(adapter):
                    if (problem := bind(sequence, adapter, self.limits)) is not None:
                        refused.append((sequence, problem))
                    else:
                        admitted.append(sequence)
                        self.queue.schedule(sequence, adapter)
                self.memory.touch(adapter)
            self._settle(adapter)
        return admitted, refused

    def ended(self, sequence: Sequence) -> None:
        """Record that a sequence has ended, whether it was scheduled or not."""
        adapter = adapter_of(sequence)
        if adapter is not None and self.queue.ended(sequence, adapter):
            self._settle(adapter)

    # ------------------------------------------------------------ the workers' memory

    def commands(self, now: float, *, idle: bool = True) -> list[Command]:
        """The messages that are due for the workers, which must be ready. idle: no step is in flight."""
        wanted = (
            adapter
            for adapter in self.queue.waiting
            if adapter.residence is Residence.ABSENT and not adapter.refusal
        )
        return self.memory.commands(wanted, self._make_room, now, idle=idle)

    def expire(self, now: float) -> list[Refusal]:
        """End the wait for adapters that take the workers too long, as on a disk that does not answer."""
        refused: list[Refusal] = []
        for adapter in self.memory.late(now):
            text = f"adapter {adapter.source.name!r} has not been read within {LOAD_SECONDS:g} s"
            refused += self._fail(adapter, TimeoutError(text))
        return refused

    def loaded(self, message: AdapterLoaded) -> list[Refusal]:
        """Take what the workers say of an adapter that they were to load; returns the sequences that cannot run."""
        adapter = self.memory.find(message.index)
        if adapter is None:
            return []  # it was dropped meanwhile
        adapter.suspicion = NO_SUSPICION
        if (error := problem_of(adapter, message, self.limits)) is not None:
            return self._fail(adapter, error)
        self.memory.keep(adapter, message)
        adapter.answer(None)
        while self.memory.is_over and (victim := self._victim(None)) is not None:
            self._drop(victim)
        self._settle(adapter)  # those that waited may have given up, and it may be retired
        return []

    def workers_lost(self, now: float, last_message: float) -> list[Refusal]:
        """Forget what was in the memory of workers that are lost; the scheduled sequences must be taken back.

        Returns the sequences whose adapter is to blame. last_message: as of `ResidentAdapters.holds_steps`.
        """
        refused: list[Refusal] = []
        for adapter in self.memory.blame(last_message):
            refused += self._fail(adapter, AdapterCrashedWorkerError(adapter.refusal))
        self.memory.clear()
        for adapter in self.registry:
            if adapter.pinned:
                self.queue.want(adapter, now)
            else:
                self._settle(adapter)
        return refused

    def _fail(self, adapter: Adapter, error: Exception) -> list[Refusal]:
        self.memory.drop(adapter)
        adapter.pinned = False
        return self._refuse(adapter, error)

    def _refuse(self, adapter: Adapter, error: Exception) -> list[Refusal]:
        """End the wait of all sequences and callers for an adapter."""
        refused = [(sequence, error) for sequence in self.queue.waiting.pop(adapter, ())]
        adapter.answer(error)
        self._settle(adapter)
        return refused

    def _make_room(self, adapter: Adapter) -> bool:
        """Drop what is least in use, so that an adapter can be loaded; False if that is not enough."""
        while not self.memory.has_room(adapter.num_bytes):
            if (victim := self._victim(adapter)) is None:
                break
            self._drop(victim)
        return self.memory.has_room(0)

    def _victim(self, adapter: Adapter | None) -> Adapter | None:
        """The adapter to drop for another one (None: for any): one that is idle, or waited for behind it."""
        for other in self.memory.resident:
            if not other.pinned and not self.queue.uses(other):
                return other
        if adapter is None:
            return None
        for other in reversed(self.queue.waiting):
            if other is adapter:
                return None
            if other.resident and not other.pinned and other not in self.queue.scheduled:
                return other
        return None

    def _drop(self, adapter: Adapter) -> None:
        self.memory.drop(adapter)
        self._settle(adapter)

    def _settle(self, adapter: Adapter) -> None:
        """Let an adapter leave each place where nothing needs it any more.

        | it leaves | unless |
        |---|---|
        | the queue | a sequence or a call waits for it, or it is pinned and has to be read again |
        | memory | it is not retired, or in the queue, or has scheduled sequences |
        | the registry | it is in memory or about to be, or has a name, or its losses of workers still count |
        """
        queue = self.queue
        has_to_be_read = bool(adapter.callers) or (adapter.pinned and not adapter.resident)
        if not (queue.waiting.get(adapter) or has_to_be_read):
            queue.waiting.pop(adapter, None)
        if queue.uses(adapter):
            return
        is_suspect = adapter.suspect and not adapter.retired  # whose losses count when it is used again
        if adapter.retired and adapter.resident:
            self._drop(adapter)
        elif adapter.residence is Residence.ABSENT and not (self.registry.is_named(adapter) or is_suspect):
            self.registry.forget(adapter)


def bind(sequence: Sequence, adapter: Adapter, limits: AdapterLimits) -> Exception | None:
    """Name the content of its adapter in the prompt, on which its blocks depend. Returns why it cannot run."""
    prompt, limit = sequence.request.prompt, limits.vocab_size + adapter.num_extra_tokens
    if prompt.adapter and prompt.adapter != adapter.content:
        return ValueError(
            f"the files of the adapter {name_of(sequence)!r} were replaced while the request ran"
        )
    if max(sequence.token_ids) >= limit:
        return ValueError(
            f"the prompt has token id {max(sequence.token_ids)}, outside the vocabulary of {limit} with the "
            f"adapter {name_of(sequence)!r}"
        )
    prompt.adapter = adapter.content
    return None


def problem_of(adapter: Adapter, message: AdapterLoaded, limits: AdapterLimits) -> Exception | None:
    """Why an adapter that was read cannot be used."""
    name = adapter.source.name
    if message.error is not None:
        kind = MemoryError if message.error_type == "MemoryError" else ValueError
        return kind(f"adapter {name!r}: {message.error}")
    if adapter.content and adapter.content != message.content:
        return ValueError(f"adapter {name!r}: its files were replaced; add it again to use the new ones")
    if message.num_bytes > limits.max_bytes:
        return ValueError(
            f"adapter {name!r} takes {message.num_bytes:,} bytes, more than all adapters together may take "
            f"(max_lora_bytes={limits.max_bytes:,})"
        )
    return None
