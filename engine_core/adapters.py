"""Which LoRA adapters the workers have in memory, and when the sequences that wait for one may be scheduled.

    enter(sequence) -> waiting -> [LoadAdapter -> AdapterLoaded] -> admit() -> Scheduler.add -> ended(sequence)

An adapter is read when a request wants it, and stays in memory until room is needed: the least recently used goes
first. One whose sequences are scheduled is never dropped, so whatever the scheduler plans is resident. The workers
read beside their steps; only the sequences that want the adapter wait for it.

Sequences of at most `max_active` adapters are scheduled at a time (`max_loras`). Of others, the adapter that has
waited longest comes next: for each one that has waited for `PATIENCE_SECONDS` with nothing but room missing, an
active one, the longest active first, gets no new sequences until it has ended its last.

Workers may die of an adapter that they read, or hang in it. One that was being read when they were lost is suspect:
the next workers read it alone, with no other adapter and no step beside it. If these are lost, too, it is refused,
and so is what needs it, until its files change or it is removed and added again.

An adapter's bytes are known once it has been read. So no further one is loaded while those in memory take
`max_bytes`, and what is idle goes as soon as they take more; by so much, an adapter or two may exceed the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import TypeAlias

from pagewire.engine_core.schedule.adapter import Adapter, AdapterLimits, Residence, key_of
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.adapters import AdapterSource
from pagewire.ipc.errors import AdapterCrashedWorkerError
from pagewire.ipc.lora import AdapterLoaded, DropAdapter, LoadAdapter

PATIENCE_SECONDS = 0.5  # that an adapter waits for room before the active ones get no new sequences
MAX_LOADING = 2  # so that the workers read the next adapter as soon as they have the last
LOAD_SECONDS = 300.0  # that the workers may take to read one, before its requests wait no longer
TRIAL_SECONDS = 10.0  # that steps wait for a suspect while the workers give signs of life, as on a slow disk
MAX_LOSSES = 4  # of workers while they read an adapter, whatever they did beside it
MAX_REGISTERED = 100_000

Refusal: TypeAlias = tuple[Sequence, Exception]


class Adapters:
    """The adapters that are registered, resident or wanted. Pure, as the scheduler is: no IO, no clock.

    Attributes:
        registered: sources by name, which requests may name without a path.
        num_loads: adapters that the workers have read.
    """

    def __init__(self, limits: AdapterLimits) -> None:
        self.limits = limits
        self.registered: dict[str, AdapterSource] = {}
        self.num_loads = 0
        self._known: dict[tuple[str, str], Adapter] = {}
        self._waiting: dict[Adapter, dict[Sequence, None]] = {}  # in the order in which the adapters came
        self._scheduled: dict[Adapter, set[Sequence]] = {}
        self._loaded: dict[int, Adapter] = {}  # loading or resident, the least recently used first
        self._commands: list[LoadAdapter | DropAdapter] = []
        self._indices = count(1)
        self._num_names: Counter[tuple[str, str]] = Counter()  # registered, by the key of the adapter
        self._trial: Adapter | None = None  # the suspect that is read next, or the last one that was

    # ------------------------------------------------------------ what there is

    @property
    def waiting(self) -> Iterator[Sequence]:
        """The sequences that wait for their adapter."""
        for sequences in self._waiting.values():
            yield from sequences

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for their adapter."""
        return sum(map(len, self._waiting.values()))

    @property
    def resident(self) -> list[Adapter]:
        """The adapters in the workers' memory, the least recently used first."""
        return [adapter for adapter in self._loaded.values() if adapter.resident]

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in the workers' memory."""
        return sum(adapter.num_bytes for adapter in self._loaded.values())

    def names_waiting(self) -> list[str]:
        """Names of the adapters for which sequences wait."""
        return names(self.waiting)

    def names_running(self) -> list[str]:
        """Names of the adapters of scheduled sequences."""
        return names(sequence for sequences in self._scheduled.values() for sequence in sequences)

    def state_of(self, source: AdapterSource) -> Adapter:
        """The adapter of a registered source."""
        return self._known[source.path, source.version]

    def ids(self) -> list[int]:
        """The ids of the adapters that are registered or resident."""
        return sorted(
            {source.adapter_id for source in self.registered.values()}
            | {adapter.source.adapter_id for adapter in self.resident}
        )

    # ------------------------------------------------------------ registering

    def register(self, source: AdapterSource, now: float, done: Callable[[Exception | None], None]) -> None:
        """Read an adapter, and give it its name once that has succeeded; then `done` gets None, or else the error.

        An adapter of the same name is replaced; its requests finish with the old one.

        Raises:
            ValueError: its id is that of another name, or there are too many.
        """
        self._check_new(source)
        adapter = self._known.setdefault((source.path, source.version), Adapter(source))

        def loaded(error: Exception | None) -> None:
            if error is None:
                try:
                    self._check_new(source)
                    self._name(source, adapter)
                except ValueError as problem:
                    error = problem
            done(error)

        self._call_when_resident(adapter, loaded, now)

    def preload(self, source: AdapterSource, now: float, done: Callable[[Exception | None], None]) -> None:
        """Register an adapter at once, read it and keep it in memory. `done`: as of `register`."""
        adapter = self._known.setdefault(key_of(source), Adapter(source))
        self._name(source, adapter)

        def loaded(error: Exception | None) -> None:
            adapter.pinned = error is None and self.limits.max_resident > 1
            done(error)

        self._call_when_resident(adapter, loaded, now)

    def _check_new(self, source: AdapterSource) -> None:
        for other in self.registered.values():
            if other.adapter_id == source.adapter_id and other.name != source.name:
                raise ValueError(
                    f"the adapter id {source.adapter_id} is that of {other.name!r}: give {source.name!r} another"
                )
        if len(self.registered) >= MAX_REGISTERED:
            raise ValueError(f"{MAX_REGISTERED} adapters are registered, which is the limit")

    def _name(self, source: AdapterSource, adapter: Adapter) -> None:
        old, self.registered[source.name] = self.registered.get(source.name), source
        self._num_names[adapter.key] += 1
        adapter.retired = False
        if old is not None:
            self._forget_name(old)

    def remove(self, adapter_id: int) -> bool:
        """Forget an adapter: it leaves memory with its last request. False if there is none with this id."""
        found = False
        for name, source in list(self.registered.items()):
            if source.adapter_id == adapter_id:
                del self.registered[name]
                self._forget_name(source)
                found = True
        for adapter in list(self._known.values()):
            if adapter.source.adapter_id == adapter_id and not self._is_registered(adapter):
                found = found or not adapter.retired
                self._retire(adapter)
        return found

    def pin(self, adapter_id: int, now: float, done: Callable[[Exception | None], None]) -> None:
        """Keep an adapter in memory; `done` gets None once it is there, or else the error.

        Raises:
            ValueError: there is none with this id, or the others would have no room.
        """
        adapter = next((a for a in self._known.values() if self._has_id(a, adapter_id)), None)
        if adapter is None:
            raise ValueError(f"no adapter has the id {adapter_id}: add it first")
        self._check_pin(adapter)

        def loaded(error: Exception | None) -> None:
            if error is None:
                try:
                    self._check_pin(adapter)
                    adapter.pinned = True
                except ValueError as problem:
                    error = problem
            done(error)

        self._call_when_resident(adapter, loaded, now)

    def _call_when_resident(
        self, adapter: Adapter, call: Callable[[Exception | None], None], now: float
    ) -> None:
        if adapter.resident:
            return call(None)
        if adapter.refusal:
            return call(AdapterCrashedWorkerError(adapter.refusal))
        adapter.callers.append(call)
        self._want(adapter, now)

    def _check_pin(self, adapter: Adapter) -> None:
        pinned = [other for other in self._known.values() if other.pinned and other is not adapter]
        if len(pinned) + 2 > self.limits.max_resident:
            raise ValueError(
                f"{len(pinned)} adapters are pinned, and of {self.limits.max_resident} (max_cpu_loras) one must "
                "be left for others"
            )
        if adapter.num_bytes + sum(other.num_bytes for other in pinned) >= self.limits.max_bytes:
            raise ValueError("pinned adapters would take all memory that adapters may take (max_lora_bytes)")

    def _has_id(self, adapter: Adapter, adapter_id: int) -> bool:
        if adapter.retired:
            return False
        sources = (source for source in self.registered.values() if key_of(source) == adapter.key)
        return adapter_id in {adapter.source.adapter_id, *(source.adapter_id for source in sources)}

    def _is_registered(self, adapter: Adapter) -> bool:
        return adapter.key in self._num_names

    def _is_kept(self, adapter: Adapter) -> bool:
        """True for an adapter that is known though it is nowhere: it has a name, or the losses of a suspect."""
        return self._is_registered(adapter) or (adapter.suspect and not adapter.retired)

    def _forget_name(self, source: AdapterSource) -> None:
        key = key_of(source)
        self._num_names[key] -= 1
        if not self._num_names[key]:
            del self._num_names[key]
            self._retire(self._known[key])

    def _retire(self, adapter: Adapter) -> None:
        adapter.retired, adapter.pinned = True, False
        self._tidy(adapter)

    # ------------------------------------------------------------ sequences

    def find(self, source: AdapterSource, *, any_path: bool) -> Adapter:
        """The adapter that a request names. any_path: it may be one that is not registered.

        Raises:
            ValueError: no adapter is registered under this name. PermissionError: another path needs `any_path`.
        """
        registered = self.registered.get(source.name)
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

    def enter(self, sequence: Sequence, now: float) -> None:
        """Let a sequence wait for its adapter, until `admit` returns it."""
        assert sequence.adapter is not None
        adapter = sequence.adapter = self._known.setdefault(sequence.adapter.key, sequence.adapter)
        if sequence.request.adapter is not None and sequence.request.adapter.path:
            adapter.retired = False  # it is used again
        self._want(adapter, now)
        self._waiting[adapter][sequence] = None

    def drop(self, sequence: Sequence) -> bool:
        """Take a sequence out of those that wait; False if it is none of them."""
        if sequence.adapter is None or sequence not in self._waiting.get(sequence.adapter, ()):
            return False
        del self._waiting[sequence.adapter][sequence]
        self._leave_queue(sequence.adapter)
        return True

    def admit(self, now: float) -> tuple[list[Sequence], list[Refusal]]:
        """The sequences that may be scheduled from now on, in order; and those that cannot run, with the reason."""
        leaving: list[Sequence] = []
        refused: list[Refusal] = []
        overdue = self._overdue(now) if self._waiting else set()
        closed = set(islice(self._scheduled, len(overdue)))
        for adapter in list(self._waiting):
            if adapter.refusal:
                refused += self._refuse(adapter, AdapterCrashedWorkerError(adapter.refusal))
            if not adapter.resident:
                continue
            if self._waiting[adapter] and self._may_run(adapter, overdue, closed):
                for sequence in self._waiting[adapter]:
                    if (problem := self._bind(sequence, adapter)) is not None:
                        refused.append((sequence, problem))
                    else:
                        leaving.append(sequence)
                        self._scheduled.setdefault(adapter, set()).add(sequence)
                self._waiting[adapter] = {}
                self._touch(adapter)
            self._leave_queue(adapter)
        return leaving, refused

    def ended(self, sequence: Sequence) -> None:
        """Record that a sequence has ended, whether it was scheduled or not."""
        adapter = sequence.adapter
        if adapter is not None and sequence in (scheduled := self._scheduled.get(adapter, set())):
            scheduled.discard(sequence)
            if not scheduled:
                del self._scheduled[adapter]
                self._tidy(adapter)

    def take_back(self, sequences: Iterable[Sequence], now: float) -> None:
        """Let scheduled sequences wait again, before those that wait already."""
        returned: dict[Adapter, dict[Sequence, None]] = {}
        for sequence in sequences:
            assert sequence.adapter is not None
            self._scheduled[sequence.adapter].discard(sequence)
            returned.setdefault(sequence.adapter, {})[sequence] = None
        for adapter, group in returned.items():
            if not self._scheduled[adapter]:
                del self._scheduled[adapter]
            group |= self._waiting.pop(adapter, {})
            adapter.since = now
        self._waiting = returned | self._waiting

    def _bind(self, sequence: Sequence, adapter: Adapter) -> Exception | None:
        """Name the content of its adapter in the prompt, on which its blocks depend. Returns why it cannot run."""
        prompt, limit = sequence.request.prompt, self.limits.vocab_size + adapter.num_extra_tokens
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

    def _may_run(self, adapter: Adapter, overdue: set[Adapter], closed: set[Adapter]) -> bool:
        if adapter in self._scheduled:
            return adapter not in closed
        return (not overdue or adapter in overdue) and len(self._scheduled) < self.limits.max_active

    def _overdue(self, now: float) -> set[Adapter]:
        """The adapters for which active ones make room: those that have waited long for nothing but that."""
        overdue = set()
        for adapter in self._waiting:
            if now - adapter.since < PATIENCE_SECONDS:
                continue
            is_stuck = adapter.residence is Residence.ABSENT and self._may_read(adapter)
            if (adapter.resident or is_stuck) and adapter not in self._scheduled:
                overdue.add(adapter)
        return overdue

    @property
    def loading(self) -> list[Adapter]:
        """The adapters that the workers read now."""
        return [adapter for adapter in self._loaded.values() if adapter.residence is Residence.LOADING]

    def _may_read(self, adapter: Adapter) -> bool:
        """Whether the workers may read another adapter: a suspect is read alone."""
        loading = self.loading
        if loading and (adapter.suspect or loading[0].suspect):
            return False
        return len(loading) < MAX_LOADING

    # ------------------------------------------------------------ the workers' memory

    def commands(self, now: float, *, idle: bool = True) -> list[LoadAdapter | DropAdapter]:
        """The messages that are due for the workers, which must be ready. idle: no step is in flight."""
        if self._trial is not None and self._trial.residence is not Residence.LOADING:
            self._trial = None
        for adapter in self._waiting:
            if adapter.residence is not Residence.ABSENT or adapter.refusal:
                continue
            if not (self._may_read(adapter) and self._make_room(adapter)):
                break  # what comes behind it could take even less
            if adapter.suspect:
                self._trial = adapter
                if not idle:
                    break  # `holds_steps` until the last one is over
            adapter.residence, adapter.index = Residence.LOADING, next(self._indices)
            adapter.loading_since = now
            self._loaded[adapter.index] = adapter
            self._commands.append(LoadAdapter(adapter.index, adapter.source.path, adapter.content))
        commands, self._commands = self._commands, []
        return commands

    def holds_steps(self, last_message: float) -> bool:
        """True while no step may be launched, since a suspect is read alone.

        last_message: monotonic time of the workers' last one. Those that hang send none, and would run no step.
        """
        suspect = self._trial
        if suspect is None or suspect.resident:
            return False
        is_read = suspect.residence is Residence.LOADING
        return not is_read or last_message - suspect.loading_since <= TRIAL_SECONDS

    def expire(self, now: float) -> list[Refusal]:
        """End the wait for adapters that take the workers too long, as on a disk that does not answer."""
        refused: list[Refusal] = []
        for adapter in list(self._loaded.values()):
            if adapter.residence is Residence.LOADING and now - adapter.loading_since > LOAD_SECONDS:
                self._commands.append(DropAdapter(adapter.index))
                text = f"adapter {adapter.source.name!r} has not been read within {LOAD_SECONDS:g} s"
                refused += self._fail(adapter, TimeoutError(text))
        return refused

    def loaded(self, message: AdapterLoaded) -> list[Refusal]:
        """Take what the workers say of an adapter that they were to load; returns the sequences that cannot run."""
        adapter = self._loaded.get(message.index)
        if adapter is None or adapter.residence is not Residence.LOADING:
            return []  # it was dropped meanwhile
        adapter.num_losses = 0
        if (error := self._problem(adapter, message)) is not None:
            self._commands.append(DropAdapter(adapter.index))  # some ranks may have it
            return self._fail(adapter, error)
        adapter.residence, adapter.content = Residence.RESIDENT, message.content
        adapter.num_bytes, adapter.rank = message.num_bytes, message.rank
        adapter.num_extra_tokens = message.num_extra_tokens
        self.num_loads += 1
        adapter.answer(None)
        while self.num_bytes > self.limits.max_bytes and (victim := self._victim(None)) is not None:
            self._drop(victim)
        if adapter in self._waiting:
            self._leave_queue(adapter)
        else:
            self._tidy(adapter)  # those that waited have given up, and it may be retired
        return []

    def workers_lost(self, now: float, last_message: float) -> list[Refusal]:
        """Forget what was in the memory of workers that are lost; the scheduled sequences must be taken back.

        Returns the sequences whose adapter is to blame. last_message: as of `holds_steps`.
        """
        refused: list[Refusal] = []
        for adapter in self.loading:
            adapter.num_losses += 1
            was_alone = adapter is self._trial and self.holds_steps(last_message)
            if was_alone or adapter.num_losses >= MAX_LOSSES:
                adapter.refusal = (
                    f"adapter {adapter.source.name!r}: {adapter.num_losses} workers were lost while they read it; "
                    "it is not read again until its files change, or it is removed and added again"
                )
                refused += self._fail(adapter, AdapterCrashedWorkerError(adapter.refusal))
        for adapter in self._loaded.values():
            adapter.residence, adapter.index = Residence.ABSENT, 0
        self._loaded, self._commands = {}, []
        for adapter in list(self._known.values()):
            if adapter.pinned:
                self._want(adapter, now)
            else:
                self._tidy(adapter)
        return refused

    def _problem(self, adapter: Adapter, message: AdapterLoaded) -> Exception | None:
        """Why an adapter that was read cannot be used."""
        name = adapter.source.name
        if message.error is not None:
            kind = MemoryError if message.error_type == "MemoryError" else ValueError
            return kind(f"adapter {name!r}: {message.error}")
        if adapter.content and adapter.content != message.content:
            return ValueError(f"adapter {name!r}: its files were replaced; add it again to use the new ones")
        if message.num_bytes > self.limits.max_bytes:
            return ValueError(
                f"adapter {name!r} takes {message.num_bytes:,} bytes, more than all adapters together may take "
                f"(max_lora_bytes={self.limits.max_bytes:,})"
            )
        return None

    def _fail(self, adapter: Adapter, error: Exception) -> list[Refusal]:
        del self._loaded[adapter.index]
        adapter.residence, adapter.index, adapter.pinned = Residence.ABSENT, 0, False
        return self._refuse(adapter, error)

    def _refuse(self, adapter: Adapter, error: Exception) -> list[Refusal]:
        """End the wait of all sequences and callers for an adapter."""
        refused = [(sequence, error) for sequence in self._waiting.pop(adapter, ())]
        adapter.answer(error)
        self._tidy(adapter)
        return refused

    def _make_room(self, adapter: Adapter) -> bool:
        """Drop what is least in use, so that an adapter can be loaded; False if that is not enough."""
        while len(self._loaded) >= self.limits.max_resident or (
            self.num_bytes + adapter.num_bytes > self.limits.max_bytes
        ):
            if (victim := self._victim(adapter)) is None:
                break
            self._drop(victim)
        return len(self._loaded) < self.limits.max_resident and self.num_bytes < self.limits.max_bytes

    def _victim(self, adapter: Adapter | None) -> Adapter | None:
        """The adapter to drop for another one (None: for any): one that is idle, or waited for behind it."""
        for other in self._loaded.values():
            if (
                other.resident
                and not other.pinned
                and not (other in self._scheduled or other in self._waiting)
            ):
                return other
        if adapter is None:
            return None
        for other in reversed(self._waiting):
            if other is adapter:
                return None
            if other.resident and not other.pinned and other not in self._scheduled:
                return other
        return None

    def _drop(self, adapter: Adapter) -> None:
        self._commands.append(DropAdapter(adapter.index))
        del self._loaded[adapter.index]
        adapter.residence, adapter.index = Residence.ABSENT, 0
        self._tidy(adapter)

    def _touch(self, adapter: Adapter) -> None:
        """Count an adapter as the most recently used."""
        self._loaded[adapter.index] = self._loaded.pop(adapter.index)

    def _want(self, adapter: Adapter, now: float) -> None:
        if adapter not in self._waiting:
            self._waiting[adapter] = {}
            adapter.since = now

    def _leave_queue(self, adapter: Adapter) -> None:
        """Take an adapter from those that are waited for, if nothing waits for it any more."""
        if not (self._waiting[adapter] or adapter.callers or (adapter.pinned and not adapter.resident)):
            del self._waiting[adapter]
            self._tidy(adapter)

    def _tidy(self, adapter: Adapter) -> None:
        """Drop an adapter that is retired, and forget one that is nowhere, if it is not in use."""
        if adapter in self._waiting or adapter in self._scheduled:
            return
        if adapter.retired and adapter.resident:
            self._drop(adapter)
        elif adapter.residence is Residence.ABSENT and not self._is_kept(adapter):
            self._known.pop(adapter.key, None)


def name_of(sequence: Sequence) -> str:
    """The name under which a sequence's request names its adapter."""
    source = sequence.request.adapter
    return "" if source is None else source.name


def names(sequences: Iterable[Sequence]) -> list[str]:
    """The names under which requests name their adapters, each once."""
    return sorted({name_of(sequence) for sequence in sequences})
