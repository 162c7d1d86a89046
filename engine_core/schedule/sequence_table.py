"""The unfinished sequences by their state, and what a running one holds: a slot, and room in the caches.

wait() -> WAITING -- start() --> RUNNING -- finish() --> FINISHED
             ^--- preempt(), requeue() ---+

A waiting sequence is held out of the queue while a cold tier reads its prefix: next(), release().
"""

from __future__ import annotations

from bisect import insort

from pagewire.engine_core.schedule.cold import ColdPrefixes, NoColdPrefixes
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.retained import NoRetainedPrefixes, RetainedPrefixes
from pagewire.engine_core.schedule.sequence import Sequence, State, WeightsVersion
from pagewire.engine_core.schedule.speculation import Speculation
from pagewire.engine_core.schedule.step import SchedulerStats
from pagewire.engine_core.schedule.turns import TurnQueue

HANDOVER_SECONDS = 0.1  # between two slots that change hands: what was preempted is computed again


class SequenceTable:
    """The waiting and running sequences of a scheduler; each method moves one to another state.

    kv: the blocks of running sequences. num_slots: the most that may run.
    waiting: an empty queue, which says whose turn it is.
    speculation: forgets drafts of sequences that stop running. stats: gets the counts.
    cold: prefixes in a cold tier; None: there are none. retained: promised prefixes; None: there are none.

    Attributes:
        running: in order. waiting: without a slot, new or preempted.
        next_handover: time from which room may change hands. weights: that the workers have.
    """

    def __init__(
        self,
        kv: KVCache,
        num_slots: int,
        waiting: TurnQueue,
        speculation: Speculation,
        stats: SchedulerStats,
        cold: ColdPrefixes | None = None,
        retained: RetainedPrefixes | None = None,
    ) -> None:
        self._cold = NoColdPrefixes() if cold is None else cold
        self._retained = NoRetainedPrefixes() if retained is None else retained
        self.running: list[Sequence] = []
        self.waiting = waiting
        self._kv, self._speculation, self._stats = kv, speculation, stats
        self._free_slots = list(range(num_slots))[::-1]
        self._freed_slots: list[int] = []  # since the last plan
        self._held: set[Sequence] = set()  # of those that wait
        self.next_handover = 0.0
        self.weights = WeightsVersion()

    def __len__(self) -> int:
        return len(self.running) + self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot: new or preempted."""
        return len(self.waiting) + len(self._held)

    @property
    def num_free_slots(self) -> int:
        """Number of sequences that may start."""
        return len(self._free_slots)

    def take_freed_slots(self) -> list[int]:
        """The slots that were freed since the last call. Some of them may be in use again."""
        freed, self._freed_slots = self._freed_slots, []
        return freed

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence that has neither slot nor blocks."""
        sequence.choose_angles()
        use_weights(sequence, self.weights)
        self.waiting.add(sequence, alone=sequence.suspect)

    def next(self, watermark: int) -> Sequence | None:
        """The next waiting sequence; those before it whose prefix is now being read are held.

        watermark: blocks that must stay free when it is admitted.
        """
        while (sequence := self.waiting.first()) is not None:
            if not self._cold.delays(sequence, self._kv, watermark):
                return sequence
            self.waiting.remove(sequence)
            self._held.add(sequence)
        return None

    def release(self, sequence: Sequence) -> None:
        """Queue a sequence again that was held, unless it has ended."""
        if sequence in self._held:
            self._held.remove(sequence)
            self.wait(sequence)

    def start(self, sequence: Sequence, now: float) -> None:
        """Give a waiting sequence, which has its blocks, a free slot."""
        self.waiting.remove(sequence)
        sequence.state, sequence.slot = State.RUNNING, self._free_slots.pop()
        sequence.was_read = False
        note_version(sequence)
        insort(self.running, sequence, key=self.waiting.order)
        self._stats.num_resumed += sequence.computed > 0
        num_charged = 0
        if sequence.num_cached_tokens is None:
            num_charged = len(sequence.token_ids) - sequence.computed
            sequence.num_cached_tokens = sequence.computed
            sequence.scheduled_time = now
            self._stats.num_prefix_queries += len(sequence.token_ids)
            self._stats.num_prefix_hits += sequence.computed
        self.waiting.started(sequence, num_charged)

    @property
    def trial_is_due(self) -> bool:
        """True if a suspect waits and none is on trial.

        Nobody is admitted until it is over, so it does not wait for the last tokens of those that run either.
        """
        return bool(self.waiting.suspects) and not any(sequence.suspect for sequence in self.running)

    def make_room(self, sequence: Sequence, num_blocks: int) -> bool:
        """Free blocks for a running sequence by preempting others.

        Returns False if it must wait for a step in flight, or was preempted itself.
        """
        while self._kv.pool.num_free < num_blocks:
            victim = self.waiting.gives_way(sequence, self.running)
            if victim.num_in_flight:
                return False
            self._stats.num_cache_preemptions += 1
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def hand_over(self, now: float) -> tuple[Sequence | None, Sequence | None]:
        """Preempt a sequence that makes room for another tenant or request which has none.

        Returns the sequence that gets the room, or else the one that gives it once its step in flight is over.
        """
        if now < self.next_handover:
            return None, None
        change = self.waiting.change_of_room(self.running, now)
        if change is None:
            return None, None
        newcomer, leaving = change
        if self._free_slots and self._kv.fits(newcomer, 0):
            return newcomer, None
        if leaving.num_in_flight:
            return None, leaving
        self.preempt(leaving)
        return newcomer, None

    def forget_prefixes(self) -> None:
        """Drop all cached prefixes, those that are promised, and those that are being read."""
        self._retained.forget(self._kv)
        self._kv.forget()
        self._cold.forget()

    def lose_prefixes(self) -> None:
        """Drop all that the caches hold, because the workers are lost; no sequence runs."""
        self._retained.forget(self._kv)
        self._kv.lose()

    def change_weights(self, weights: WeightsVersion) -> None:
        """Learn that the workers have other weights; no sequence runs. Nothing cached is found any more."""
        self.weights = weights
        self.forget_prefixes()
        for sequence in self.waiting.withdraw(lambda _: True):
            self.wait(sequence)

    def begin(self, now: float, limited: bool) -> None:
        """Begin a plan. limited: see `CacheGroup.begin`."""
        self.tick(now)
        self._kv.begin(self.running, limited)

    def tick(self, now: float) -> None:
        """End what was promised until now."""
        self._retained.tick(now, self._kv)

    def retain(self, sequence: Sequence) -> None:
        """Promise what a running sequence's request asks for, as far as it is computed."""
        self._retained.retain(sequence, self._kv)

    def preempt(self, sequence: Sequence) -> None:
        """Queue a running sequence again, because others need its room."""
        self._stats.num_preemptions += 1
        self.waiting.preempted(sequence)
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a running sequence again; its tokens will be recomputed."""
        self._stop(sequence)
        self.wait(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence. Its full blocks stay in the prefix cache."""
        if sequence.state is State.RUNNING:
            self._kv.keep(sequence)
            self._retained.retain(sequence, self._kv)
            self._stop(sequence)
        elif sequence in self._held:
            self._held.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        self._speculation.end(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Free blocks and slot of a running sequence; safe with steps in flight, as workers run plans in order."""
        self.running.remove(sequence)
        self.waiting.stopped(sequence)
        self._kv.free(sequence)
        self._free_slots.append(sequence.slot)
        self._freed_slots.append(sequence.slot)
        self._speculation.forget(sequence)
        sequence.slot = -1


def use_weights(sequence: Sequence, weights: WeightsVersion) -> None:
    """Let a sequence, which has neither slot nor blocks, run with these weights from now on."""
    if weights is not sequence.weights:
        sequence.weights = weights
        sequence.block_names.clear()


def note_version(sequence: Sequence) -> None:
    """Note which weights give the next tokens of a sequence, if others gave the last ones."""
    name, start = sequence.weights.name, sequence.num_output_tokens
    if name != (sequence.versions[-1][1] if sequence.versions else ""):
        sequence.versions = [*(span for span in sequence.versions if span[0] < start), (start, name)]
