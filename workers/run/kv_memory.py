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

AHEAD_BYTES = 128 << 20
"""Of the KV cache, that are taken from the system before a step writes there."""
POPULATED_BYTES = 2 << 20
"""Of one tensor, that are taken at once: a large page, which takes the system some tenths of a millisecond."""


class KVMemory:
    """The KV caches and states of a model's layers, and the KV cache of its drafter.

    loaded: the model, or the same one loaded earlier. block_size: tokens of a KV block.

    Attributes:
        is_taken: there is memory. caches, states: of the model's layers; empty while their memory is given back.
        block_bytes: of a KV block, the drafter's part included. state_bytes: of a state slot.
    """

    def __init__(self, loaded: LoadedModel, block_size: int, device: Device, drafter: Drafter) -> None:
        self._block_size, self._device, self._drafter = block_size, device, drafter
        own = (shape.block_bytes(block_size) for shape in loaded.kv_shapes)
        self.block_bytes = sum(own) + drafter.block_bytes
        self.state_bytes = state_bytes(loaded.state_shapes)
        self.caches: list[Cache] = []
        self.states: list[Tensor] = []
        self.is_taken = False
        self._num_populated = 0  # blocks, from the first on, whose pages were taken from the system

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
            self.is_taken = True
        except OSError as error:
            needed = size.num_blocks * self.block_bytes + size.num_states * self.state_bytes
            raise LoadError(f"cannot allocate {needed} bytes of KV memory: {error}") from error

    def check_taken(self) -> None:
        """Check that steps have memory to write to.

        Raises:
            RuntimeError: it is given back, because the worker sleeps.
        """
        if not self.is_taken:
            raise RuntimeError("the worker is asleep and its KV memory is given back: call wake_up first")

    def populate(self, num_used: int) -> Iterator[None]:
        """Take the pages behind the first `num_used` blocks from the system: `AHEAD_BYTES`, a few with each `next`.

        What is not used stays with the system, so that an idle worker is as small as what it has served.
        """
        memory = memory_of([*self.caches, *self._drafter.caches])
        num_blocks = min((len(cache) for cache in memory), default=0)
        goal = min(num_blocks, num_used + AHEAD_BYTES // max(1, self.block_bytes))
        largest = max((cache[:1].nbytes for cache in memory), default=1)
        while self._num_populated < goal:
            end = min(goal, self._num_populated + max(1, POPULATED_BYTES // largest))
            for cache in memory:
                if not self._device.populate(cache[self._num_populated : end]):
                    self._num_populated = num_blocks
                    return
                yield
            self._num_populated = end

    def zero_first_block(self) -> None:
        """Remove what steps have left there that no request has asked for."""
        for memory in memory_of(self.caches):
            memory[0].zero_()

    def let_go(self) -> None:
        """Give the memory of the model's layers back."""
        self.caches, self.states, self.is_taken = [], [], False
        self._num_populated = 0

    def free(self) -> None:
        """Give all of it back; the drafter forgets every sequence."""
        self.let_go()
        self._drafter.free()
