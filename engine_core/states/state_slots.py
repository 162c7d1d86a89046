"""The state slots of each sequence: memory for the states of all recurrent layers, after one of its tokens.

KV is there for every token; states are there only where a slot holds them. So a prefix ends at a checkpoint: a slot
that was kept at a block boundary, under the name of the token block that ends there. Nothing is ever copied. The
row behind a checkpoint reads the checkpoint's slot, and writes one of the sequence's own:

    row                      reads        writes
    first of a sequence      nothing      own
    next                     own          own
    one that passes a        own          checkpoint, own
      block boundary
    one that ends at it      own          checkpoint
    the row behind it        checkpoint   own
    with drafts              a            b: if all drafts were right, the sequence goes on from b, else from a

The rows of a plan run at the same time, so none may read what another one writes. What a plan names and gives back
can therefore be used by the next one (`settle`). Workers run plans in order. A sequence that could go on from what
the plan writes is not admitted to it, if that saves more than half of its work.

Each running sequence has a slot that it can write, so it never waits for states, and is never preempted for them.
At most half of the slots are such ones. The others hold checkpoints and the states behind drafts, as long as there
are free ones: without, a prefix is cached less far, or a row has no drafts.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagewire.engine_core.schedule.blocks import Block, BlockPool
from pagewire.engine_core.schedule.cache_group import CacheGroup
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.states.held_states import HeldStates, StateCheckpoint
from pagewire.ipc.wire.steps import Row, StepPlan

# Tokens between checkpoints where no KV says what their memory is worth: of a model without attention. A prompt of
# 8,192 tokens has 16, and another one that leaves it anywhere runs 256 tokens again in the mean.
CHECKPOINT_TOKENS = 512


class StateSlots(CacheGroup):
    """The pool of state slots in terms of sequences and tokens.

    spacing: tokens between two checkpoints of a long prompt; rounded up to whole blocks.

    Attributes:
        num_made: checkpoints that were named. held: the slots of each running sequence.

    Raises:
        ValueError: there are too few slots.
    """

    def __init__(self, num_slots: int, block_size: int, spacing: int = CHECKPOINT_TOKENS) -> None:
        if num_slots < 2:  # a sequence that goes on from a checkpoint writes another slot
            raise ValueError("1 state slot does not hold one request, which needs 2; give more memory")
        self.pool = BlockPool(num_slots)
        self.num_made = 0
        self.held: dict[Sequence, HeldStates] = {}
        self._num_running = 0
        self._block_size, self._spacing = block_size, -(-spacing // block_size) * block_size
        self._read: list[Block] = []  # by rows of this plan, which read them last
        self._writers: list[Sequence] = []  # whose rows in this plan, or earlier ones, write checkpoints
        self._coming: set[bytes] = set()  # names of this plan's checkpoints

    @property
    def usage(self) -> float:
        """Fraction of the slots that running sequences use, 0 to 1."""
        return self.pool.num_used / len(self.pool)

    def forget(self) -> None:
        """Drop the checkpoints that are not in use."""
        self.pool.forget()

    def forget_name(self, name: bytes) -> None:
        """Drop the checkpoint at the end of a block with this name."""
        if (slot := self.pool.find(name)) is not None:
            self.pool.unname(slot)

    def lose(self) -> None:
        """Drop all checkpoints, because the workers are lost; no sequence runs."""
        self.pool.forget()

    # ------------------------------------------------------------ admission

    def reach(self, sequence: Sequence, end: int) -> int:
        """The last checkpoint of a sequence's prefix up to `end`, as a number of tokens; 0 if there is none."""
        for i in range(end // self._block_size, 0, -1):
            if sequence.block_names[i - 1] in self.pool.named:
                return i * self._block_size
        return 0

    def fits(self, sequence: Sequence, end: int) -> bool:
        """True if a sequence can be admitted with `end` cached tokens, and should be."""
        if 2 * (self._num_running + 1) > len(self.pool) or self._awaits(sequence, end):
            return False
        found = self._found(sequence, end)
        return 1 + (found is not None and found.num_refs == 0) <= self.pool.num_free

    def admit(self, sequence: Sequence, end: int) -> None:
        """Give a sequence a slot, and the checkpoint behind its `end` cached tokens.

        Raises:
            ValueError: it does not fit.
        """
        found = self._found(sequence, end)
        if found is not None:
            self.pool.share([found])
        (own,) = self.pool.allocate(1)
        self.held[sequence] = HeldStates(own, found)
        self._num_running += 1

    def _awaits(self, sequence: Sequence, end: int) -> bool:
        """True if a checkpoint that this plan writes would save a sequence more than half of its work."""
        if not self._coming:
            return False
        first = (end + len(sequence.token_ids)) // 2 // self._block_size
        usable = sequence.block_names[first : sequence.shared_end // self._block_size]
        return not self._coming.isdisjoint(usable)

    def _found(self, sequence: Sequence, end: int) -> Block | None:
        return self.pool.find(sequence.block_names[end // self._block_size - 1]) if end else None

    # ------------------------------------------------------------ rows

    def takes_drafts(self, sequence: Sequence) -> bool:
        """True if there is a slot for the states behind drafts."""
        held = self.held[sequence]
        return held.latest is not held.own or self.pool.num_free > 0

    def fill(self, sequence: Sequence, row: Row) -> None:
        """Say which slots a row reads and writes."""
        held, end = self.held[sequence], row.start + row.num_tokens
        row.state = -1 if held.latest is None else held.latest.block_id
        num_needed = int(bool(row.drafts) and held.latest is held.own)
        for checkpoint in self._checkpoints(sequence, row):
            if self.pool.num_free <= num_needed:
                break
            self._keep(sequence, row, *checkpoint)
        if row.states and row.states[-1][0] == end:
            written = held.unnamed[-1].slot
            self.pool.share([written])
        else:
            written = self.pool.allocate(1)[0] if num_needed else held.own
            row.states = [*row.states, (end, written.block_id)]
        if row.drafts:
            held.tried = written
        else:
            self._read += self._shared(held, held.latest)
            held.latest = written
        if held.unnamed:
            self._writers.append(sequence)

    def verify(self, sequence: Sequence, row: Row, num_rejected: int) -> int:
        """Choose the states to go on with after a row with drafts of which the last `num_rejected` were wrong.

        Returns how many tokens are computed: all of the row's, or none, since a row keeps no states between them.
        """
        held = self.held[sequence]
        chosen, other = (held.latest, held.tried) if num_rejected else (held.tried, held.latest)
        self.pool.free(self._shared(held, other))
        held.latest, held.tried = chosen, None
        end = row.start + row.num_tokens
        if not num_rejected:
            return end
        while held.unnamed and held.unnamed[-1].end > end - num_rejected:
            self.pool.free([held.unnamed.pop().slot])
        return row.start

    def settle(self, plan: StepPlan) -> None:
        """End a plan: name what it writes, as far as tokens are known, and give back what its rows read last."""
        self.pool.free(self._read)
        self._read.clear()
        for sequence in self._writers:
            self.register(sequence)
        self._writers.clear()
        self._coming.clear()

    def register(self, sequence: Sequence) -> None:
        """Name the checkpoints of a sequence whose tokens are all known, so that others can share them."""
        held = self.held[sequence]
        sequence.name_blocks(self._block_size)
        while held.unnamed and held.unnamed[0].end <= len(sequence.token_ids):
            checkpoint = held.unnamed.pop(0)
            name = sequence.block_names[checkpoint.end // self._block_size - 1]
            self.num_made += self.pool.register(checkpoint.slot, name)
            self.pool.free([checkpoint.slot])
            if held.rolling is not None and is_spare(*held.rolling):
                self.pool.unname(held.rolling[0])
            held.rolling = (checkpoint.slot, name) if checkpoint.rolling else None

    def free(self, sequence: Sequence) -> None:
        """Return a sequence's slots to the pool. No row of the plan that is being made uses them."""
        held = self.held.pop(sequence)
        self._num_running -= 1
        self.pool.free([checkpoint.slot for checkpoint in held.unnamed])
        self.pool.free([*self._shared(held, held.latest), *self._shared(held, held.tried), held.own])

    def _shared(self, held: HeldStates, slot: Block | None) -> list[Block]:
        """`slot`, if the sequence has a reference to it beside that to its own slot."""
        return [] if slot is None or slot is held.own else [slot]

    # ------------------------------------------------------------ checkpoints

    def _keep(self, sequence: Sequence, row: Row, end: int, rolling: bool) -> None:
        (slot,) = self.pool.allocate(1)
        self.held[sequence].unnamed.append(StateCheckpoint(end, slot, rolling))
        row.states = [*row.states, (end, slot.block_id)]
        if end <= len(sequence.token_ids):
            sequence.name_blocks(self._block_size)
            self._coming.add(sequence.block_names[end // self._block_size - 1])

    def _checkpoints(self, sequence: Sequence, row: Row) -> Iterator[tuple[int, bool]]:
        """Where a row keeps states, in order, and whether only until the sequence's next checkpoint.

        In a prompt: every `spacing` tokens; where it leaves what is cached of another one, as a third may do;
        where the same prompt can go on; and up to where it is to stay cached. Behind it: at the last block
        boundary, where a next turn can.
        """
        size, start, end = self._block_size, row.start, row.start + row.num_tokens
        last = end - end % size
        if last <= start:
            return
        ends = dict.fromkeys(
            range(start - start % self._spacing + self._spacing, end + 1, self._spacing), False
        )
        parts = [sequence.num_prompt_tokens - 1, *(wish.num_tokens for wish in sequence.request.retention)]
        for place in (sequence.shared_end, *(sequence.prefix_end(part, size) for part in parts)):
            if start < place <= end:
                ends[place] = False
        if row.num_samples:
            ends.setdefault(last, True)
        for place in sorted(ends):
            if not self._is_kept(sequence, place):
                yield place, ends[place]

    def _is_kept(self, sequence: Sequence, end: int) -> bool:
        """True if there is a checkpoint behind the first `end` tokens, by this sequence or by another."""
        unnamed, index = self.held[sequence].unnamed, end // self._block_size - 1
        if unnamed and end <= unnamed[-1].end:
            return True
        return index < len(sequence.block_names) and sequence.block_names[index] in self.pool.named


def is_spare(slot: Block, name: bytes) -> bool:
    """True if a slot still has a name, and nothing holds it: neither a row nor a promise."""
    return slot.name == name and slot.num_refs == 0
