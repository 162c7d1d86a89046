"""Which of several models are loaded: a state machine for each, in one table. No IO, no clock.

    absent --> starting --> idle <--> ready
      ^           |           |         |
      +-----------+-------- stopping <--+ (only if its core is lost)

A model is ready while requests use it, and idle while none does. `next_action` says what to start or stop next: an
idle model ends when its time is over, or when the oldest demand needs its memory; of several, the one that was used
least recently. Where that is not enough, busy ones let no more requests in until they are idle (`yields`). Demands
for models that are absent are served in the order in which they came.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ModelState(Enum):
    """The state of one model. Its core runs, or is about to, in all but `ABSENT`."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    IDLE = "idle"
    STOPPING = "stopping"


LOADED = (ModelState.READY, ModelState.IDLE)


class ActionKind(Enum):
    """The next thing to do with a model. The answer to each is one of the table's methods."""

    MEASURE = "measure"  # measured, or failed
    START = "start"  # started, or failed
    STOP = "stop"  # stopped
    REFUSE = "refuse"  # nothing: the model does not fit, and its demand is gone


class Action(NamedTuple):
    """An action, and the name of its model."""

    kind: ActionKind
    name: str


@dataclass
class ShelfEntry:
    """A model in the table.

    pinned: neither idleness nor another model's need of memory ends it. uses: requests that use it now.
    waiting: requests that wait for it. wanted: it is to start even if none waits. turn: of its demand among others.
    need: bytes of memory; None: not measured since it was last loaded. measuring: that is being done.
    used_at: when it became idle, in seconds. keep: seconds for which it stays idle; None: as the table says.
    yields: no more requests are let in. leaves: it is forgotten once it has ended. generation: number of its last
    start among those of all models.
    """

    name: str
    pinned: bool = False
    state: ModelState = ModelState.ABSENT
    uses: int = 0
    waiting: int = 0
    wanted: bool = False
    turn: int = 0
    need: int | None = None
    measuring: bool = False
    used_at: float = 0.0
    keep: float | None = None
    yields: bool = False
    leaves: bool = False
    generation: int = 0

    @property
    def is_demanded(self) -> bool:
        """Requests wait for it, or it was asked for."""
        return self.waiting > 0 or self.wanted

    @property
    def is_open(self) -> bool:
        """It is demanded, and to be started for that."""
        return self.is_demanded and self.state is ModelState.ABSENT

    @property
    def held(self) -> int:
        """Bytes of memory that are taken by it, or kept for it."""
        return 0 if self.state is ModelState.ABSENT else self.need or 0


class ShelfTable:
    """The models of a server by name.

    names: of all models. pinned: some of them. capacity: bytes of memory for all together.
    idle_seconds: after which an idle model ends; infinity: only for others.

    Raises:
        ValueError: a pinned model is not among them.
    """

    def __init__(
        self, names: Iterable[str], pinned: Iterable[str], capacity: int, idle_seconds: float = math.inf
    ) -> None:
        self.entries = {name: ShelfEntry(name) for name in names}
        pinned = frozenset(pinned)
        for name in pinned:
            if name not in self.entries:
                raise ValueError(f"pin: there is no model {name!r}; models: {', '.join(self.entries)}")
            self.entries[name].pinned = True
        self.capacity, self.idle_seconds = capacity, idle_seconds
        self._pinned = pinned
        self._turns = self._starts = 0

    # --------------------------------------------------------------- models

    def add(self, name: str) -> None:
        """Add a model; one that leaves stays."""
        self.entries.setdefault(name, ShelfEntry(name, name in self._pinned)).leaves = False

    def forget(self, name: str) -> None:
        """Have a model leave the table once its requests have ended; those that wait are to be withdrawn."""
        entry = self.entries[name]
        entry.leaves, entry.wanted = True, False

    def take_out(self) -> list[str]:
        """Take those that leave out of the table, if they have ended; returns their names."""
        gone = [
            entry.name
            for entry in self.entries.values()
            if entry.leaves
            and entry.state is ModelState.ABSENT
            and not (entry.measuring or entry.is_demanded)
        ]
        for name in gone:
            del self.entries[name]
        return gone

    # ------------------------------------------------------------- requests

    def ask(self, name: str, waits: bool = True) -> None:
        """Demand a model.

        waits: a request waits for it, until `grant` or `withdraw` is called; else nobody does.
        """
        entry = self.entries[name]
        if not entry.is_demanded:
            self._turns += 1
            entry.turn = self._turns
        if waits:
            entry.waiting += 1
        else:
            entry.wanted = entry.state not in LOADED

    def withdraw(self, name: str) -> None:
        """Take back the demand of a request that waits no more."""
        entry = self.entries[name]
        assert entry.waiting > 0
        entry.waiting -= 1
        if not entry.is_demanded and entry.state is ModelState.ABSENT:
            entry.need = None  # it may take another amount when it is demanded again

    def may_enter(self, name: str) -> bool:
        """True if a request may use the model now."""
        entry = self.entries[name]
        return entry.state in LOADED and not entry.yields

    def grant(self, name: str) -> int:
        """Let a waiting request use a model, which it may enter. Returns the generation, for `release`."""
        assert self.may_enter(name)
        self.withdraw(name)
        return self.hold(name)

    def hold(self, name: str) -> int:
        """Count one more use of a loaded model."""
        entry = self.entries[name]
        assert entry.state in LOADED
        entry.state, entry.uses = ModelState.READY, entry.uses + 1
        return entry.generation

    def release(self, name: str, generation: int, now: float) -> None:
        """End a use. That of a core that was lost meanwhile counts no more."""
        entry = self.entries.get(name)
        if entry is None or entry.generation != generation or entry.state is not ModelState.READY:
            return
        entry.uses -= 1
        if not entry.uses:
            entry.state, entry.used_at = ModelState.IDLE, now

    def keep(self, name: str, seconds: float | None) -> None:
        """Set for how long a model stays idle, until it ends; None: as long as others."""
        self.entries[name].keep = seconds

    # --------------------------------------------------------------- events

    def measured(self, name: str, need: int) -> None:
        """A model needs this many bytes."""
        entry = self.entries[name]
        entry.measuring = False
        if entry.is_demanded:
            entry.need = need

    def started(self, name: str, now: float) -> None:
        """The core of a model is ready."""
        entry = self.entries[name]
        assert entry.state is ModelState.STARTING
        entry.state, entry.used_at, entry.wanted = ModelState.IDLE, now, False

    def failed(self, name: str) -> None:
        """A model cannot be measured, or did not start. The requests that wait for it are to be withdrawn."""
        entry = self.entries[name]
        entry.state, entry.need, entry.measuring, entry.wanted = ModelState.ABSENT, None, False, False

    def lost(self, name: str) -> None:
        """The core of a loaded model is lost; its requests have ended, or will, with an error."""
        entry = self.entries[name]
        if entry.state in LOADED:
            entry.state, entry.uses, entry.yields = ModelState.STOPPING, 0, False

    def stopped(self, name: str) -> None:
        """The core of a model has ended."""
        entry = self.entries[name]
        assert entry.state is ModelState.STOPPING
        entry.state, entry.need, entry.keep = ModelState.ABSENT, None, None

    # ------------------------------------------------------------- decisions

    def next_action(self, now: float) -> Action | None:
        """Decide, and change the state for what is to be done; None: nothing now. Call it until then."""
        for entry in self.entries.values():
            if entry.state is ModelState.IDLE and self.expires_at(entry) <= now:
                return self._stop(entry)
        demands = sorted((entry for entry in self.entries.values() if entry.is_open), key=turn_of)
        for entry in demands:
            if entry.need is None and not entry.measuring:
                entry.measuring = True
                return Action(ActionKind.MEASURE, entry.name)
        if not demands or demands[0].need is None:
            self._keep_out(())
            return None
        return self._make_room(demands[0])

    def expires_at(self, entry: ShelfEntry) -> float:
        """When an idle model ends, if nothing happens before; infinity: never."""
        if entry.state is not ModelState.IDLE or (entry.waiting and not entry.yields):
            return math.inf
        return entry.used_at + self.patience(entry)

    def patience(self, entry: ShelfEntry) -> float:
        """Seconds for which a model stays idle before it ends."""
        if entry.leaves:
            return 0.0
        if entry.keep is not None:
            return entry.keep
        return math.inf if entry.pinned else self.idle_seconds

    @property
    def free(self) -> int:
        """Bytes of memory that no model has."""
        return self.capacity - sum(entry.held for entry in self.entries.values())

    def _keep_out(self, busy: Collection[str]) -> None:
        """Let no more requests into these models, and into all others again."""
        for entry in self.entries.values():
            entry.yields = entry.name in busy

    def _make_room(self, demand: ShelfEntry) -> Action | None:
        """Start the model with the oldest demand, or make room for it."""
        assert demand.need is not None
        missing = demand.need - self.free
        if missing <= 0:
            self._keep_out(())
            self._starts += 1
            demand.state, demand.generation = ModelState.STARTING, self._starts
            return Action(ActionKind.START, demand.name)
        others = [entry for entry in self.entries.values() if entry is not demand]
        # Those that start may be stopped later, so they count as well.
        if missing > sum(entry.held for entry in others if not entry.pinned or not self._is_kept(entry)):
            demand.wanted, demand.need = False, None
            self._keep_out(())
            return Action(ActionKind.REFUSE, demand.name)
        missing -= sum(entry.held for entry in others if entry.state is ModelState.STOPPING)
        loaded = [entry for entry in others if entry.state in LOADED and not entry.pinned]
        busy = []
        for entry in sorted(loaded, key=last_use):
            if missing <= 0:
                break
            if entry.state is ModelState.IDLE and (entry.yields or not entry.waiting):
                return self._stop(entry)
            busy.append(entry.name)  # or it will be in a moment, for those who wait
            missing -= entry.held
        self._keep_out([name for name in busy if self.entries[name].state is ModelState.READY])
        return None

    def _is_kept(self, entry: ShelfEntry) -> bool:
        return entry.state in (*LOADED, ModelState.STARTING)

    def _stop(self, entry: ShelfEntry) -> Action:
        entry.state, entry.yields = ModelState.STOPPING, False
        return Action(ActionKind.STOP, entry.name)

    # ----------------------------------------------------------------- checks

    def validate(self) -> None:
        """Check what holds at any time between two calls.

        Raises:
            AssertionError: it does not.
        """
        for entry in self.entries.values():
            assert (entry.uses > 0) == (entry.state is ModelState.READY), entry
            assert entry.uses >= 0 and entry.waiting >= 0, entry
            assert not entry.yields or entry.state in LOADED, entry
            assert not entry.measuring or entry.state is ModelState.ABSENT, entry
            assert entry.state is ModelState.ABSENT or entry.need is not None, entry
            assert not (entry.wanted and entry.state in LOADED), entry
        assert self.free >= 0, self.entries


def turn_of(entry: ShelfEntry) -> int:
    """Order of demands: the oldest first."""
    return entry.turn


def last_use(entry: ShelfEntry) -> tuple[bool, float]:
    """Order in which models end for another: idle ones first, the least recently used of them before others."""
    return entry.state is ModelState.READY, entry.used_at
