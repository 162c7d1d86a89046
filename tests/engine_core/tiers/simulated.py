"""A simulated scheduler and worker (`simulation.py`) with a cold tier, whose reads end when the test says so."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from pagewire.engine_core.schedule.blocks import BlockPool
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tiers.costs import ReadCosts
from pagewire.engine_core.tiers.peer_names import PrefixQuestion
from pagewire.engine_core.tiers.reads import READ_SECONDS, FetchedPart, Preemption, PrefixReads
from pagewire.ipc.wire.steps import StepPlan
from pagewire.ipc.wire.tier_messages import (
    BlockBack,
    BlockOut,
    BlocksMoved,
    MoveBlocks,
    SwapCopy,
    state_name,
)
from tests.engine_core.schedule.simulation import Simulation


class AnyRead(ReadCosts):
    """Reads whatever there is."""

    def reads(
        self,
        num_blocks: int,
        num_saved: int,
        *,
        state: bool = False,
        num_fetched: int = 0,
        num_swapped: int = 0,
    ) -> bool:
        return num_saved > 0

    def asks(self, num_blocks: int) -> bool:
        return num_blocks > 0


class TieredSimulation(Simulation):
    """Blocks go to the tier, and come back, as the messages before plans say.

    elsewhere: what other cores have: all that was ever evicted. num_peers: those that can be asked.
    keeps: there is a tier on disk, too. swap_size: places in the swap space for blocks, and for states.
    """

    def __init__(
        self,
        costs: ReadCosts | None = None,
        num_peers: int = 0,
        keeps: bool = True,
        swap_size: tuple[int, int] = (0, 0),
        preemption: Preemption = "auto",
        **config: Any,
    ) -> None:
        self.keeps, self.swap_size = keeps, swap_size
        self.reads = PrefixReads(costs or AnyRead(4), on_disk=keeps or num_peers > 0, preemption=preemption)
        self.reads.swap.open(*swap_size)
        self.swap: dict[tuple[bool, int], list[int | None]] = {}  # what is in its places
        self.tier: dict[bytes, list[int | None]] = {}  # of states, one number
        self.parents: dict[bytes, bytes] = {}
        self.pending: deque[MoveBlocks] = deque()  # reads that have begun
        self.elsewhere: dict[bytes, list[int | None]] = {}
        self.questions: deque[PrefixQuestion] = deque()
        self.parts: deque[FetchedPart] = deque()
        self.reads.peers.reachable = range(num_peers)
        self.queue: deque[StepPlan | MoveBlocks | FetchedPart] = deque()
        super().__init__(cold=self.reads, **config)
        for pool in self.pools():
            pool.evicted = []

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self._tick())
        self.queue += self.reads.take_moves(self.scheduler.kv, self.now)
        for question in self.reads.peers.take_questions():
            question.until = self.now + 5
            question.open = {(peer, 0) for peer in self.reads.peers.reachable}
            self.questions.append(question)
        self.queue += self.reads.take_parts()
        if plan is not None:
            self.queue.append(plan)
            self.plans.append(plan)
        else:
            busy = self.scheduler.in_flight or self.reads.num_reads or self.questions
            assert busy or not self.scheduler.num_unfinished, "nothing will ever run"
        self._run_worker()
        self.check()
        return plan

    def _run_worker(self) -> None:
        """Messages and plans in their order; a masked plan waits, and what is behind it too."""
        while self.queue:
            if isinstance(message := self.queue[0], StepPlan):
                if not self._run_worker_once():
                    return
            elif isinstance(message, FetchedPart):
                self._begin_read(message.blocks)
                self.parts.append(message)
            else:
                self._move(message)
            self.queue.popleft()

    def _move(self, message: MoveBlocks) -> None:
        for block in message.out:
            cells = self._cells(block)
            assert self.elsewhere.setdefault(block.name, cells) == cells, "a name is of two contents"
            self.parents[block.name] = block.parent
            if self.keeps:
                self.tier[block.name] = cells
                self.reads.names.add(block.name)
        for copy in message.swap_out:
            assert copy.place < self.swap_size[copy.is_state]
            self.swap[copy.is_state, copy.place] = self._cells(copy)
        if message.back or message.swap_back:
            self._begin_read([*message.back, *message.swap_back])
            self.pending.append(message)

    def _begin_read(self, blocks: Iterable[BlockBack | SwapCopy]) -> None:
        """Until the end of the read these hold nonsense."""
        for back in blocks:
            self._set(back, [-1] * len(self._cells(back)))

    def _cells(self, block: BlockOut | BlockBack | SwapCopy) -> list[int | None]:
        """The numbers of a block, or that of a state slot."""
        size, number = self.config.block_size, block.block_id
        return (
            self.worker.states[number : number + 1]
            if block.is_state
            else self.worker.kv[number * size :][:size]
        )

    def _set(self, block: BlockBack | SwapCopy, content: list[int | None]) -> None:
        size, number = self.config.block_size, block.block_id
        if block.is_state:
            self.worker.states[number : number + 1] = content
        else:
            self.worker.kv[number * size : (number + 1) * size] = content

    def finish_read(self, fails: int = 0) -> None:
        """The oldest read ends. fails: bits of the blocks that cannot be read."""
        message = self.pending.popleft()
        missing = []
        for copy in message.swap_back:  # whatever was evicted meanwhile, its place has kept it
            self._set(copy, self.swap[copy.is_state, copy.place])
        for index, block in enumerate(message.back):
            content = self.tier.get(block.name)
            if content is None or fails >> index & 1:
                missing.append(block.name)
                self.tier.pop(block.name, None)
            else:
                self._set(block, content)
        self._release(self.reads.finish(BlocksMoved(message.number, missing), self.scheduler.kv))
        self.check()

    def move_elsewhere(self) -> None:
        """Another core has all that is cached here, which is lost; no step is in flight."""
        kv = self.scheduler.kv
        for block in kv.pool.named.values():
            self._keep_elsewhere(BlockOut(block.block_id, block.name or b"", block.parent))
        if (slots := kv.group(StateSlots)) is not None:
            for slot in slots.pool.named.values():
                self._keep_elsewhere(BlockOut(slot.block_id, state_name(slot.name or b""), slot.parent, True))
        self.forget_tier()
        self.reads.peers.forget_asked()
        self.reset_prefix_cache()

    def _keep_elsewhere(self, block: BlockOut) -> None:
        cells = self._cells(block)
        assert self.elsewhere.setdefault(block.name, cells) == cells, "a name is of two contents"

    def answer(self, lies: int = 0) -> None:
        """All cores answer the oldest question. lies: bits of the names of which they say the contrary."""
        question = self.questions.popleft()
        says = [(name in self.elsewhere) ^ (lies >> index & 1) for index, name in enumerate(question.names)]
        for peer in self.reads.peers.reachable:
            self._release(self.reads.peers.answered(question.number, peer, 0, bytes(says)))
        self.check()

    def leave_unanswered(self) -> None:
        """No question is answered in time."""
        self._release(self.reads.peers.expire(self.now + 10)[0])
        self.questions.clear()
        self.check()

    def finish_fetch(self, fails: int = 0) -> None:
        """The oldest part has come. fails: bits of the blocks that have not, or are damaged."""
        part = self.parts.popleft()
        missing = []
        for index, block in enumerate(part.blocks):
            content = self.elsewhere.get(block.name)
            if content is None or fails >> index & 1:
                missing.append(block.name)
            else:
                self._set(block, content)
        self._release(self.reads.finish(BlocksMoved(part.number, missing), self.scheduler.kv))
        self.check()

    def _release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.scheduler.sequences.release(sequence)

    def settle(self) -> None:
        """All that others are asked for comes."""
        while self.questions or self.parts or self.pending:
            if self.questions:
                self.answer()
            elif self.parts:
                self.finish_fetch()
            else:
                self.finish_read()

    def expire_reads(self) -> None:
        """All reads take too long."""
        self._release(self.reads.expire(self.now + 2 * READ_SECONDS))
        self.check()

    def fail(self) -> Any:
        self._release(self.reads.lose(self.scheduler.kv))
        for moving in (self.pending, self.questions, self.parts):
            moving.clear()
        self.queue.clear()
        self.swap.clear()
        self.reads.swap.open(*self.swap_size)
        outcomes = super().fail()
        self.reads.names.update(self.tier)
        return outcomes

    def check(self) -> None:
        """Held sequences are those that wait for a read."""
        assert {s for s in self.reads.held if not s.finished} == self.scheduler.sequences._held
        pinned = Counter(place for read in self.reads._reads.values() for place in read.places)
        swap = self.reads.swap
        for place in [*swap._blocks.blocks, *swap._states.blocks]:
            assert place.num_refs == pinned[place], "a place is pinned for no read, or is not for one"
        super().check()

    def forget_tier(self) -> None:
        """Nothing is in the tier any more; reads that have begun find nothing."""
        self.tier.clear()
        self.reads.names.clear()

    def step(self) -> StepPlan | None:
        plan = super().step()
        if not self.scheduler.in_flight:
            self.settle()
        return plan

    def drain(self, limit: int = 3000) -> None:
        self.settle()
        super().drain(limit)
        self.settle()
        assert not self.reads.num_reads

    def _others(self, pool: BlockPool) -> Counter[int]:
        reads = self.reads._reads.values()
        if pool is not self.scheduler.kv.pool:
            return Counter(read.states.block_id for read in reads if read.states is not None)
        return Counter(block.block_id for read in reads for block in [*read.cached, *read.blocks.values()])


class Workers:
    """Keeps what it is sent."""

    accepting = True

    def __init__(self) -> None:
        self.sent: list[MoveBlocks] = []

    def send(self, message: MoveBlocks) -> None:
        self.sent.append(message)
