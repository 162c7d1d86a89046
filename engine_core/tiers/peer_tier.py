"""The core's side of blocks that come from other cores: asks who has them, fetches them, and has workers take them.

    PeerNames.ask --> PeerLinks.find --> PeerNames.answered
    PrefixReads.take_parts --> PeerLinks.fetch --> MoveBlocks(entries) --> workers --> PrefixReads.finish

Fetching goes on beside steps. Of all parts only `WINDOW_BYTES` are on their way or wait for the workers.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable

from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.tiers.costs import ReadCosts
from pagewire.engine_core.tiers.peer_link import PeerEvent
from pagewire.engine_core.tiers.peer_links import PeerLinks
from pagewire.engine_core.tiers.peer_names import PrefixQuestion, chunks
from pagewire.engine_core.tiers.reads import FetchedPart, PrefixReads
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.ipc.wire.block_names import NAME_BYTES
from pagewire.ipc.wire.calls import MAX_NAMES_BYTES
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.tier_messages import MAX_PARTS, PART_BYTES, BlocksMoved, MoveBlocks, TierReport

logger = logging.getLogger("pagewire.core")

WINDOW_BYTES = 16 * PART_BYTES  # of blocks that are on their way to the workers, but one part at least
ASK_SECONDS = 2.0  # that a sequence waits for answers at most
MIN_ASK_SECONDS = 0.25
ASK_SHARE = 0.5  # of the time that computing takes: a sequence waits for answers no longer
ASK_AGAIN_SECONDS = 10.0  # after which cores are asked again for what they did not have
USELESS_SECONDS = (
    15.0  # for which a core is not asked that gave no block of a part: it has none, or damaged ones
)


class PeerTier(Wing):
    """Asks other cores for blocks. Its answers go through `reads`, as those of the tier on disk.

    Attributes:
        num_questions: prefixes that cores were asked for. num_expired: sequences that no longer waited for answers.
        fetch_seconds: that fetching took, bytes and their way.
    """

    def __init__(
        self,
        links: PeerLinks,
        reads: PrefixReads,
        costs: ReadCosts,
        scheduler: Scheduler,
        worker: WorkerGroup,
    ) -> None:
        self.links = links
        self.num_questions = self.num_expired = 0
        self.fetch_seconds = 0.0
        self._reads, self._costs, self._scheduler, self._worker = reads, costs, scheduler, worker
        self._identity = b""
        self._queue: list[FetchedPart] = []
        self._moving: dict[
            int, FetchedPart
        ] = {}  # by number: they are on their way, or the workers take them
        self._fetching: set[int] = set()  # those that have not come yet
        self._overdue: set[int] = set()  # cores that have not answered in time, until they do
        self._useless: dict[int, float] = {}  # cores that are not asked before a time
        self._next_forget = 0.0

    # ------------------------------------------------------------ a turn of the loop

    def wait(self, now: float) -> float:
        """Seconds until a question is no longer waited for."""
        end = self._reads.peers.next_end
        return math.inf if end is None else max(0.0, end - now)

    def check_timers(self, now: float) -> None:
        """Let the sequences go on whose questions are not answered in time."""
        sequences, peers = self._reads.peers.expire(now)
        self.num_expired += len(sequences)
        self._overdue |= peers
        self._release(sequences)
        if now >= self._next_forget:
            self._next_forget = now + ASK_AGAIN_SECONDS
            self._reads.peers.forget_asked()

    def advance(self) -> None:
        """Take what other cores have answered."""
        for event in self.links.take():
            self._overdue.discard(event.peer)
            if event.first is None:
                self._fetched(event)
            else:
                self._release(
                    self._reads.peers.answered(event.number, event.peer, event.first, event.content)
                )
        now = time.monotonic()
        useless = {peer for peer, until in self._useless.items() if now < until}
        reachable = self.links.reachable - self._overdue - useless
        self._reads.peers.reachable = reachable if self._identity else ()

    def planned(self) -> None:
        """Send the questions of sequences that are held, and fetch what is to be read."""
        for question in self._reads.peers.take_questions():
            self._ask(question)
        self._queue += self._reads.take_parts()
        self._fetch_more()

    # ------------------------------------------------------------ questions

    def _ask(self, question: PrefixQuestion) -> None:
        now, peers = time.monotonic(), self._reads.peers
        self.num_questions += 1
        seconds = ASK_SHARE * self._costs.compute(len(question.names)) or ASK_SECONDS
        question.until = now + min(max(seconds, MIN_ASK_SECONDS), ASK_SECONDS)
        parts = chunks(question.names, MAX_NAMES_BYTES // NAME_BYTES)
        question.open = {(peer, first) for peer in peers.reachable for first, _ in parts}
        for peer in peers.reachable:
            for first, names in parts:
                self.links.find(peer, question.number, first, self._identity, b"".join(names))

    # ------------------------------------------------------------ blocks

    def _fetch_more(self) -> None:
        """Fetch the next parts, as far as there is room for them."""
        num_bytes = sum(part.num_bytes for part in self._moving.values())
        num_open = Counter(self._moving[number].peer for number in self._fetching)
        for part in list(self._queue):
            if num_open[part.peer] >= MAX_PARTS:
                continue
            if self._moving and num_bytes + part.num_bytes > WINDOW_BYTES:
                return
            self._queue.remove(part)
            num_bytes += part.num_bytes
            num_open[part.peer] += 1
            self._moving[part.number] = part
            self._fetching.add(part.number)
            names = b"".join(block.name for block in part.blocks)
            self.links.fetch(part.peer, part.number, self._identity, names)

    def _fetched(self, event: PeerEvent) -> None:
        """Have the workers take what has come of a part; what has not is missing."""
        part = self._moving.get(event.number)
        if part is None or event.number not in self._fetching:
            return  # the workers were lost meanwhile
        self._fetching.discard(part.number)
        if event.content and self._worker.accepting:
            self.fetch_seconds += event.seconds
            self._costs.measure_fetch(len(event.content), event.seconds)
            entries = Tensor("uint8", (len(event.content),), event.content)
            self._worker.send(MoveBlocks(part.number, back=part.blocks, entries=entries))
        else:
            moved = BlocksMoved(part.number, [block.name for block in part.blocks])
            self.moved(moved)
            self._release(self._reads.finish(moved, self._scheduler.kv))
        self._fetch_more()

    def moved(self, moved: BlocksMoved) -> None:
        """Learn that a part has ended, if this is one: the workers have taken what they could."""
        if (part := self._moving.pop(moved.number, None)) is None:
            return
        if len(moved.missing) == len(part.blocks):
            self._useless[part.peer] = time.monotonic() + USELESS_SECONDS
        self._fetch_more()

    def _release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._scheduler.sequences.release(sequence)

    # ------------------------------------------------------------ the workers

    def identify(self, report: TierReport) -> None:
        """Learn which model and layout the blocks are of: nothing is asked before that is known."""
        self._identity = report.identity

    def worker_lost(self, why: str, *, was_ready: bool) -> None:
        """Forget what was on its way."""
        self._queue.clear()
        self._moving.clear()
        self._fetching.clear()
        self._identity = b""

    def close(self) -> None:
        """End the thread."""
        self.links.close()
