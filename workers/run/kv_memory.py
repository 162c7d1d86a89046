"""A worker's memory for keys, values and states: taken when it starts, given back while it sleeps."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagewire.kernels.data.paging import Cache
from pagewire.workers.caches.kv import memory_of
from pagewire.workers.caches.states import allocate_states, state_bytes
from pagewire.workers.device.interface import Device
from pagewire.workers.device.kv_size import CacheSize
from pagewire.workers.errors import LoadError
from pagewire.workers.network.loaded import LoadedModel
from pagewire.workers.speculation.interface import Drafter


class KVMemory:
    """The KV caches and states of a model's layers, and the KV cache of its drafter.

    loaded: the model, or the same one loaded earlier. block_size: tokens of a KV block.

    Attributes:
        caches, states: of the model's layers; empty while their memory is given back.
        block_bytes: of a KV block, the drafter's part included. state_bytes: of a state slot.
        spare_work: optional work for idle moments, a few milliseconds with each `next`.
    """

    spare_work: Iterator[None]

    def __init__(self, loaded: LoadedModel, block_size: int, device: Device, drafter: Drafter) -> None:
        self._block_size, self._device, self._drafter = block_size, device, drafter
        own = (shape.block_bytes(block_size) for shape in loaded.kv_shapes)
        self.block_bytes = sum(own) + drafter.block_bytes
        self.state_bytes = state_bytes(loaded.state_shapes)
        self.caches: list[Cache] = []
        self.states: list[Tensor] = []
        self.spare_work = iter(())

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes by use: kv_cache and states."""
        kv = sum(cache.nbytes for cache in memory_of([*self.caches, *self._drafter.caches]))
        return {"kv_cache": kv, "states": sum(state.nbytes for state in self.states)}

    def allocate(self, loaded: LoadedModel, size: CacheSize) -> None:
        """Take memory for these numbers of KV blocks and state slots, zeroed.

        Raises:
            LoadError: there is not enough.
        """
        try:
            self._drafter.allocate(size.num_blocks)
            self.caches = loaded.allocate(size.num_blocks, self._block_size, self._device)
            self.states = allocate_states(loaded.state_shapes, size.num_states, self._device)
        except OSError as error:
            needed = size.num_blocks * self.block_bytes + size.num_states * self.state_bytes
            raise LoadError(f"cannot allocate {needed} bytes of KV memory: {error}") from error

    def populate(self) -> None:
        """Have the memory's pages taken from the system in idle moments."""
        memory = memory_of([*self.caches, *self._drafter.caches])
        self.spare_work = self._device.populate(self.states + memory)

    def zero_first_block(self) -> None:
        """Remove what steps have left there that no request has asked for."""
        for memory in memory_of(self.caches):
            memory[0].zero_()

    def let_go(self) -> None:
        """Give the memory of the model's layers back."""
        self.caches, self.states = [], []

    def free(self) -> None:
        """Give all of it back; the drafter forgets every sequence."""
        self.let_go()
        self.spare_work = iter(())
        self._drafter.free()
