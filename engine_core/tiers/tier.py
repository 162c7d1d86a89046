"""The core's side of the cold tiers: what the workers are to move, and what they say of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step import PlannedStep, StepOutcomes
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tiers.costs import ReadCosts
from pagewire.engine_core.tiers.lending import BlockLending
from pagewire.engine_core.tiers.peer_tier import PeerTier
from pagewire.engine_core.tiers.reads import PrefixReads
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.ipc.wire.block_names import split_names
from pagewire.ipc.wire.steps import StepResult
from pagewire.ipc.wire.tier_messages import (
    BlockOut,
    BlocksMoved,
    ForgetBlocks,
    MoveBlocks,
    TierReport,
    state_name,
)
from pagewire.ipc.wire.worker_messages import Ready

logger = logging.getLogger("pagewire.core")

SAVED = -1  # number of the messages with which all blocks are saved
SAVED_BYTES = 64 << 20  # in one of these messages: what the worker keeps beside is larger


class ColdTier(Wing):
    """Keeps the cold tiers in step with the scheduler and the workers.

    reads: of the scheduler. costs: those that `reads` decides by.
    block_bytes, state_bytes: of a KV block, and of a state slot.
    keeps, swaps: there is one on disk, and swap space.

    Attributes:
        report: the last that the workers have sent. keeps, swaps: as given.
        peers, lending: blocks of other cores, and for them; None: there are none.
    """

    def __init__(
        self,
        reads: PrefixReads,
        costs: ReadCosts,
        scheduler: Scheduler,
        worker: WorkerGroup,
        block_bytes: int,
        state_bytes: int = 0,
        *,
        keeps: bool = True,
        swaps: bool = False,
        peers: PeerTier | None = None,
        lending: BlockLending | None = None,
    ) -> None:
        self.reads, self.report, self.keeps, self.swaps = reads, TierReport(), keeps, swaps
        self.peers, self.lending = peers, lending
        self._costs, self._scheduler, self._worker = costs, scheduler, worker
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self._unsaved: Iterator[BlockOut] | None = None
        self._is_saved = False
        if keeps or swaps:
            scheduler.kv.pool.evicted = []
            if (states := scheduler.kv.group(StateSlots)) is not None:
                states.pool.evicted = []

    def planned(self) -> None:
        """Send what is to be moved before the plan that was just made."""
        for message in self.reads.take_moves(self._scheduler.kv, time.monotonic()):
            self._worker.send(message)

    def committed(self, step: PlannedStep, result: StepResult, outcomes: StepOutcomes, now: float) -> None:
        """Take the time of a step into account."""
        num_tokens = sum(row.num_tokens for row in step.rows)
        self._costs.measure_step(num_tokens, step.num_prompt_tokens, result.busy_us / 1e6)

    def receive(self, message: Any) -> bool:
        """Take a report of the workers."""
        if not isinstance(message, TierReport):
            return False
        self._take(message)
        return True

    def worker_ready(self, ready: Ready) -> None:
        """Learn what new workers have found in the tiers: files on disk, and empty swap space."""
        self.reads.swap.open(ready.num_swap_blocks, ready.num_swap_states)
        for report in ready.tier:
            self._take(report)

    def _take(self, report: TierReport) -> None:
        """Take a report: names that come and go, and reads that are over, whose sequences wait no longer."""
        self.reads.names.update(split_names(report.added))
        self.reads.names.difference_update(split_names(report.removed))
        if report.bytes_read > self.report.bytes_read:
            seconds = report.read_seconds - self.report.read_seconds
            self._costs.measure_read(report.bytes_read - self.report.bytes_read, seconds)
        if report.bytes_swapped > self.report.bytes_swapped:
            seconds = report.swap_seconds - self.report.swap_seconds
            self._costs.measure_swap(report.bytes_swapped - self.report.bytes_swapped, seconds)
        self.report = report
        if self.peers is not None:
            self.peers.identify(report)
        if self.lending is not None:
            self.lending.identity = report.identity
            for lent in report.lent:
                self.lending.lent(lent)
        for moved in report.moved:
            self._moved(moved)

    def _moved(self, moved: BlocksMoved) -> None:
        if moved.number == SAVED:
            self._save_more()
            return
        if self.peers is not None:
            self.peers.moved(moved)
        self._release(self.reads.finish(moved, self._scheduler.kv))

    def _release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._scheduler.sequences.release(sequence)

    def check_timers(self, now: float) -> None:
        """Let the sequences compute their prefix that have waited for it for too long."""
        if self.reads.num_reads and (late := self.reads.expire(now)):
            logger.warning("KV blocks were not read in time; they are computed")
            self._release(late)

    def worker_lost(self, why: str, *, was_ready: bool) -> None:
        """Forget what was in the tier until new workers say it; sequences compute what was being read."""
        self._release(self.reads.lose(self._scheduler.kv))
        if self.lending is not None:
            self.lending.worker_lost()
        self.report = TierReport()
        self._is_saved = self._unsaved is not None

    def forget(self) -> None:
        """Remove all blocks of this model and layout from disk. Other cores keep theirs."""
        self.reads.names.clear()
        if self._worker.accepting:
            self._worker.send(ForgetBlocks())

    # ------------------------------------------------------------ at the end

    def has_saved(self) -> bool:
        """Begin to write all cached blocks to disk; True once all of them are written."""
        if not self.keeps:
            return True
        if self._unsaved is None:
            self._unsaved = self._cached()
            self._is_saved = not self._worker.accepting
            if not self._is_saved:
                self._worker.send(MoveBlocks(SAVED))  # answered when all that was evicted is written
        return self._is_saved

    def _save_more(self) -> None:
        out: list[BlockOut] = []
        num_bytes = 0
        for block in self._unsaved or ():
            if block.name not in self.reads.names:
                out.append(block)
                num_bytes += self._state_bytes if block.is_state else self._block_bytes
                if num_bytes >= SAVED_BYTES:
                    break
        if out and self._worker.accepting:
            self._worker.send(MoveBlocks(SAVED, out))
        else:
            self._is_saved = True
            logger.info("KV blocks on disk: %d", len(self.reads.names))

    def _cached(self) -> Iterator[BlockOut]:
        """All cached blocks and states; no sequence runs any more."""
        kv = self._scheduler.kv
        slots = kv.group(StateSlots)
        for block in list(kv.pool.named.values()):
            if block.name is not None:
                yield BlockOut(block.block_id, block.name, block.parent)
        for slot in list(slots.pool.named.values()) if slots is not None else ():
            if slot.name is not None:
                yield BlockOut(slot.block_id, state_name(slot.name), slot.parent, True)
