"""The bytes of KV blocks and state slots in a worker's memory: copied out as they lie, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.ipc.wire.tier_messages import BlockBack, BlockOut, SwapCopy


class BlockMemory:
    """The memory of all layers, block by block or state slot by state slot.

    A block's content is that of its part of each tensor, one behind the other. The order of elements within a part
    is that of the kernels (`kernels/cpu/layout.h`).

    tensors: of all layers, each once, [num_blocks, ...]. On a GPU blocks are gathered and scattered alone.

    Attributes:
        block_bytes: of a block. num_blocks: of them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.reshape(len(tensor), -1).view(torch.uint8) for tensor in tensors]
        self._parts: list[NDArray[np.uint8]] = (
            [tensor.numpy() for tensor in self._tensors] if tensors[0].is_cpu else []
        )
        self._sizes = [tensor.shape[1] for tensor in self._tensors]
        self.block_bytes = sum(self._sizes)
        self.num_blocks = len(tensors[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    def copy_out(self, block_ids: Sequence[int]) -> list[list[memoryview]]:
        """Copies of blocks, each in pieces."""
        indices = np.array(block_ids, np.int64)
        copies = [part[indices] for part in self._parts]
        return [[copy[i].data for copy in copies] for i in range(len(block_ids))]

    def copy_into(self, block_id: int, content: NDArray[np.uint8]) -> None:
        """Copy a block into `content` [block_bytes]."""
        begin = 0
        for part in self._parts:
            end = begin + part.shape[1]
            content[begin:end] = part[block_id]
            begin = end

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

    def gather(self, block_ids: Tensor) -> Tensor:
        """The contents of blocks, uint8 [n, block_bytes], on their device. block_ids: int64 [n], there."""
        return torch.cat([tensor.index_select(0, block_ids) for tensor in self._tensors], 1)

    def scatter(self, block_ids: Tensor, contents: Tensor) -> None:
        """Set blocks to their contents; see `gather`."""
        for tensor, part in zip(self._tensors, contents.split_with_sizes(self._sizes, 1), strict=True):
            tensor.index_copy_(0, block_ids, part)


@dataclass(frozen=True)
class TierMemory:
    """What a worker moves: blocks, and state slots; None: the model keeps no states."""

    blocks: BlockMemory
    states: BlockMemory | None = None

    @classmethod
    def of_tensors(cls, blocks: Sequence[Tensor], states: Sequence[Tensor]) -> TierMemory:
        """The memory of all layers: of their caches, each once, and of their states."""
        return cls(BlockMemory(blocks), BlockMemory(states) if states else None)

    def of(self, block: BlockOut | BlockBack | SwapCopy) -> BlockMemory:
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
