"""The bytes of KV blocks and state slots in a worker's memory: copied out as they lie, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.wire.tier_messages import BlockBack, BlockOut


class BlockMemory:
    """The memory of all layers on the host, block by block or state slot by state slot.

    A block's content is that of its part of each tensor, one behind the other. The order of elements within a part
    is that of the kernels (`kernels/cpu/layout.h`).

    tensors: of all layers, each once, [num_blocks, ...].
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts: list[NDArray[np.uint8]] = [
            tensor.reshape(len(tensor), -1).view(torch.uint8).numpy() for tensor in tensors
        ]
        self.block_bytes = sum(part.shape[1] for part in self._parts)

    def copy_out(self, block_ids: Sequence[int]) -> list[list[memoryview]]:
        """Copies of blocks, each in pieces."""
        indices = np.array(block_ids, np.int64)
        copies = [part[indices] for part in self._parts]
        return [[copy[i].data for copy in copies] for i in range(len(block_ids))]

    def copy_in(self, block_id: int, content: memoryview) -> None:
        """Set a block to its content.

        Raises:
            ValueError: it has another size.
        """
        if len(content) != self.block_bytes:
            raise ValueError(f"{len(content)} bytes are not the {self.block_bytes} of a block")
        data, begin = np.frombuffer(content, np.uint8), 0
        for part in self._parts:
            end = begin + part.shape[1]
            part[block_id] = data[begin:end]
            begin = end


@dataclass(frozen=True)
class TierMemory:
    """What a worker moves: blocks, and state slots; None: the model keeps no states."""

    blocks: BlockMemory
    states: BlockMemory | None = None

    @classmethod
    def of_tensors(cls, blocks: Sequence[Tensor], states: Sequence[Tensor]) -> TierMemory:
        """The memory of all layers: of their caches, each once, and of their states."""
        return cls(BlockMemory(blocks), BlockMemory(states) if states else None)

    def of(self, block: BlockOut | BlockBack) -> BlockMemory:
        """The memory in which a block lies.

        Raises:
            ValueError: it has states, and the model keeps none.
        """
        if not block.is_state:
            return self.blocks
        if self.states is None:
            raise ValueError("this model keeps no states")
        return self.states

    @property
    def state_bytes(self) -> int:
        """Bytes of a state slot; 0: the model keeps no states."""
        return 0 if self.states is None else self.states.block_bytes
