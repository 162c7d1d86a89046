"""Moves blocks between memory and the cold tiers in a thread, beside the steps.

Reads come before writes, since sequences wait for them. What is to be written waits in memory of a bounded size:
what does not fit is dropped, and is a miss later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias

from pagewire.ipc.wire.codec import Buffer, Tensor
from pagewire.ipc.wire.tier_messages import BlockBack, BlockOut, BlocksMoved, LentBlocks, TierReport
from pagewire.workers.tiers.entry import decoded_entries, encoded_entry
from pagewire.workers.tiers.folder import TierFolder
from pagewire.workers.tiers.memory import TierMemory
from pagewire.workers.tiers.no_folder import NoFolder
from pagewire.workers.tiers.swap import Restore

logger = logging.getLogger("pagewire.worker")

WAITING_BYTES = 256 << 20  # of blocks that are copied out and not written yet
REFRESH_SECONDS = 5.0  # between two looks at what other processes have written and removed
FAILED_SECONDS = 30.0  # without writing, after the disk has refused
REPORTED_WRITES = 64  # blocks that are written between two reports at most


Job: TypeAlias = Callable[[], None]


class BlockMover:
    """The thread, and what it has to do. Other methods are for the thread that runs steps.

    folder: is the thread's alone. wake: called by the thread when there is a report.
    """

    def __init__(self, folder: TierFolder | NoFolder, wake: Callable[[], None]) -> None:
        self._folder, self._wake = folder, wake
        self._identity = b""  # of blocks that go to other cores
        self._changed = threading.Condition()
        self._reads: deque[Job] = deque()
        self._writes: deque[tuple[int, Job]] = deque()  # with the bytes that each has to write
        self._waiting_bytes = self._num_dropped = 0
        self._ends = False
        self._num_unreported = 0
        self._reports: list[TierReport] = []
        self._read_seconds = 0.0
        self._swapped = 0, 0.0  # bytes and seconds of what came from swap space
        self._no_writes_before = 0.0
        self._next_refresh = time.monotonic() + REFRESH_SECONDS
        self._report()
        self._thread = threading.Thread(target=self._run, name="tier", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for the thread that runs steps

    def num_accepted(self, sizes: Sequence[int]) -> int:
        """How many of the first blocks of these sizes may be copied out; the others are dropped."""
        with self._changed:
            room = WAITING_BYTES - self._waiting_bytes
            accepted = sum(total <= room for total in accumulate(sizes))
            self._num_dropped += len(sizes) - accepted
            return accepted

    def write(self, block: BlockOut, pieces: Sequence[Buffer]) -> None:
        """Write a block, given a copy of it in pieces."""
        self._add_write(partial(self._write, block, pieces), sum(map(len, pieces)))

    def read(
        self, number: int, blocks: Sequence[BlockBack], memory: TierMemory, restore: Restore | None = None
    ) -> None:
        """Read blocks into a memory, and answer the message with this number.

        restore: ends the copies from swap space that belong to it.
        """
        self._add_read(partial(self._read, number, blocks, memory, restore))

    def take(self, number: int, blocks: Sequence[BlockBack], entries: Buffer, memory: TierMemory) -> None:
        """Take blocks into a memory that another core has sent, and answer the message with this number."""
        self._add_read(partial(self._take, number, blocks, entries, memory))

    def lend(self, number: int, blocks: Sequence[BlockOut], copies: Mapping[bytes, Sequence[Buffer]]) -> None:
        """Answer with entries for another core. copies: of blocks in memory, by name; the others are on disk."""
        self._add_read(partial(self._lend, number, blocks, copies))

    def identify(self, identity: bytes) -> None:
        """Report the identity of blocks that go to other cores; for any thread."""
        self._add_read(partial(self._identify, identity))

    def answer(self, number: int) -> None:
        """Answer the message with this number once all blocks before it are written."""
        self._add_write(partial(self._answer, number))

    def clear(self) -> None:
        """Remove all blocks from the folder, also those that wait to be written."""
        self._add_write(self._clear)

    def _add_read(self, job: Job) -> None:
        with self._changed:
            self._reads.append(job)
            self._changed.notify()

    def _add_write(self, job: Job, num_bytes: int = 0) -> None:
        with self._changed:
            self._writes.append((num_bytes, job))
            self._waiting_bytes += num_bytes
            self._changed.notify()

    def take_reports(self) -> list[TierReport]:
        """What has happened since the last call."""
        with self._changed:
            reports, self._reports = self._reports, []
            return reports

    def close(self) -> None:
        """End the thread once all that waits is written."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()
        self._folder.close()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._ends or self._reads or self._writes:
            if (job := self._next()) is not None:
                job()
            if time.monotonic() >= self._next_refresh:
                self._refresh()

    def _next(self) -> Job | None:
        """What is to be done next; None once the next refresh is due, or the thread ends."""
        with self._changed:
            while not (self._reads or self._writes or self._ends):
                if not self._changed.wait(max(0.0, self._next_refresh - time.monotonic())):
                    return None
            if self._reads:
                return self._reads.popleft()
            if not self._writes:
                return None
            num_bytes, job = self._writes.popleft()
            self._waiting_bytes -= num_bytes
            return job

    def _read(
        self, number: int, blocks: Sequence[BlockBack], memory: TierMemory, restore: Restore | None
    ) -> None:
        if restore is not None:
            self._swapped = restore()
        began = time.monotonic()
        missing = []
        for block in blocks:
            content = self._folder.read(block.name)
            if content is None:
                missing.append(block.name)
            else:
                memory.of(block).copy_in(block.block_id, content)
        self._read_seconds += time.monotonic() - began
        self._report(BlocksMoved(number, missing))

    def _take(self, number: int, blocks: Sequence[BlockBack], entries: Buffer, memory: TierMemory) -> None:
        counts = self._folder.counts
        sizes = {block.name: memory.of(block).block_bytes for block in blocks}
        contents, problem = decoded_entries(memoryview(entries), self._identity, sizes)
        if problem is not None:
            counts.damaged += len(blocks) - len(contents)
            logger.warning("KV blocks of another core are not as they were sent: %s", problem)
        for block in blocks:
            if (content := contents.get(block.name)) is not None:
                memory.of(block).copy_in(block.block_id, content)
                counts.fetched += 1
                counts.bytes_fetched += len(content)
        self._report(BlocksMoved(number, [block.name for block in blocks if block.name not in contents]))

    def _lend(
        self, number: int, blocks: Sequence[BlockOut], copies: Mapping[bytes, Sequence[Buffer]]
    ) -> None:
        entries: list[Buffer] = []
        num_blocks = 0
        for block in blocks:
            parent, pieces = block.parent, copies.get(block.name)
            if pieces is None:
                began, on_disk = time.monotonic(), self._folder.parent_of(block.name)
                content = self._folder.read(block.name)
                self._read_seconds += time.monotonic() - began
                if content is None or on_disk is None:
                    continue
                parent, pieces = on_disk, [content]
            entries += encoded_entry(self._identity, block.name, parent, pieces)
            num_blocks += 1
        data = b"".join(entries)
        self._report(lent=LentBlocks(number, Tensor("uint8", (len(data),), data), num_blocks))

    def _identify(self, identity: bytes) -> None:
        self._identity = identity
        self._report(identified=True)

    def _write(self, block: BlockOut, pieces: Sequence[Buffer]) -> None:
        if time.monotonic() < self._no_writes_before:
            self._folder.counts.dropped += 1
            return
        try:
            self._folder.write(block.name, block.parent, pieces)
        except OSError as error:
            self._no_writes_before = time.monotonic() + FAILED_SECONDS
            self._folder.counts.dropped += 1
            logger.warning("KV blocks are not written for %g s: %s", FAILED_SECONDS, error)
        self._num_unreported += 1
        if self._num_unreported >= REPORTED_WRITES or not self._writes:
            self._report()

    def _answer(self, number: int) -> None:
        self._report(BlocksMoved(number))

    def _clear(self) -> None:
        self._folder.clear()
        self._report()

    def _refresh(self) -> None:
        self._next_refresh = time.monotonic() + REFRESH_SECONDS
        try:
            self._folder.refresh()
        except OSError as error:
            logger.warning("the folder of KV blocks cannot be read: %s", error)
        self._report()

    def _report(self, *moved: BlocksMoved, lent: LentBlocks | None = None, identified: bool = False) -> None:
        """Report what has changed, if anything has."""
        came, went = self._folder.take_changes()
        if not (came or went or moved or lent or identified):
            return
        self._num_unreported = 0
        counts = self._folder.counts
        report = TierReport(b"".join(came), b"".join(went), list(moved))
        report.num_written, report.num_read = counts.written, counts.read
        report.num_unreadable, report.num_dropped = counts.unreadable, counts.dropped + self._num_dropped
        report.bytes_written, report.bytes_read = counts.bytes_written, counts.bytes_read
        report.num_bytes, report.read_seconds = self._folder.num_bytes, self._read_seconds
        report.num_fetched, report.bytes_fetched = counts.fetched, counts.bytes_fetched
        report.num_damaged, report.identity = counts.damaged, self._identity
        report.bytes_swapped, report.swap_seconds = self._swapped
        report.lent = [] if lent is None else [lent]
        with self._changed:
            self._reports.append(report)
        self._wake()
