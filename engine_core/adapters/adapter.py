"""A LoRA adapter, as the core knows it, and how many there may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.suspicion import ADAPTER_RULE, NO_SUSPICION, Suspicion
from pagewire.ipc.wire.lora import AdapterSource


class Residence(Enum):
    """Where an adapter is: on disk, on its way to the workers, or in their memory."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(frozen=True)
class AdapterLimits:
    """How many adapters there may be.

    max_active: with scheduled sequences. max_resident: in the workers' memory. max_bytes: that these take there,
    over all ranks. vocab_size: of the model without an adapter.
    """

    max_active: int
    max_resident: int
    max_bytes: int
    vocab_size: int


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter that is in the workers' memory, or is to be.

    source: where it is read from, and the name that it was first used under.
    index: its number on the workers, another one each time that it is loaded; 0 while it is absent.
    content: sha256 of what was read; empty before the first time.
    num_bytes, rank, num_extra_tokens: as the workers have reported them; 0 before that.
    pinned: it stays in memory. retired: it leaves memory with its last request.
    since: monotonic time from which requests wait for it. loading_since: from which the workers read it.
    suspicion: that workers crash of it while they read it, since it was last read.
    refusal: why it is not read any more; empty: it may be read.
    callers: called once it is resident, with None, or else with the error.
    """

    source: AdapterSource
    residence: Residence = Residence.ABSENT
    index: int = 0
    content: bytes = b""
    num_bytes: int = 0
    rank: int = 0
    num_extra_tokens: int = 0
    pinned: bool = False
    retired: bool = False
    since: float = 0.0
    loading_since: float = 0.0
    suspicion: Suspicion = NO_SUSPICION
    refusal: str = ""
    callers: list[Callable[[Exception | None], None]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """Its path and version: one folder with the same files is one adapter, under whatever names."""
        return key_of(self.source)

    @property
    def resident(self) -> bool:
        """True if rows may be planned with it."""
        return self.residence is Residence.RESIDENT

    @property
    def suspect(self) -> bool:
        """True if it may be what the workers were lost of: it is read alone."""
        return self.suspicion.is_suspect(ADAPTER_RULE)

    def answer(self, error: Exception | None) -> None:
        """Call those who wait for it to be resident."""
        callers, self.callers = self.callers, []
        for call in callers:
            call(error)


def adapter_of(sequence: Sequence) -> Adapter | None:
    """The adapter that a sequence runs with; None: the model alone."""
    adapter = sequence.adapter
    assert adapter is None or isinstance(adapter, Adapter)
    return adapter


def key_of(source: AdapterSource) -> tuple[str, str]:
    """By which an adapter is found; see `Adapter.key`."""
    return source.path, source.version
