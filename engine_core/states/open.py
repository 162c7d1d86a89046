"""Opens the state slots of an engine, if the layers of its model keep states."""

from __future__ import annotations

from pagewire.engine_core.states.state_slots import CHECKPOINT_TOKENS, StateSlots
from pagewire.ipc.wire.worker_messages import Ready


def open_states(ready: Ready, block_size: int) -> StateSlots | None:
    """The state slots that the workers have allocated; None if the model keeps no states.

    Raises:
        ValueError: there are too few.
    """
    if not ready.num_states:
        return None
    return StateSlots(ready.num_states, block_size, checkpoint_tokens(ready, block_size))


def checkpoint_tokens(ready: Ready, block_size: int) -> int:
    """Tokens between two checkpoints of states in a prompt: as many as have KV of the size of one checkpoint."""
    if not ready.bytes_per_block:
        return CHECKPOINT_TOKENS
    return -(-ready.bytes_per_state * block_size // ready.bytes_per_block)
