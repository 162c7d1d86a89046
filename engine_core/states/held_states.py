"""What one sequence has of the state slots; `state_slots` says how they are used."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.engine_core.schedule.blocks import Block


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """States behind the first `end` tokens of a sequence.

    rolling: the next checkpoint of the sequence replaces it.
    """

    end: int
    slot: Block
    rolling: bool


@dataclass(slots=True, eq=False)
class HeldStates:
    """The slots of a running sequence, each with a reference of its own.

    own: that its rows write, and no other's. latest: with the states behind its computed tokens, often `own`; None:
    nothing is computed.
    tried: that its row in flight with drafts writes; None without such a row.
    unnamed: checkpoints that its rows write; they get names once their tokens are known.
    rolling: the last checkpoint that got one and is to be replaced, with that name.
    """

    own: Block
    latest: Block | None
    tried: Block | None = None
    unnamed: list[StateCheckpoint] = field(default_factory=list)
    rolling: tuple[Block, bytes] | None = None
