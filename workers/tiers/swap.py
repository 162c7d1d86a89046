"""The swap space of a worker: host memory for KV blocks and states, by place. The core says what lies where."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pagewire.ipc.wire.tier_messages import SwapCopy
from pagewire.workers.device.interface import Device, Event
from pagewire.workers.device.kv_size import GIB, CacheSize
from pagewire.workers.errors import LoadError
from pagewire.workers.tiers.memory import BlockMemory, TierMemory

CHUNK_BYTES = 256 << 20  # that are taken at once: PyTorch rounds pinned memory up to a power of two
GATHERED_BYTES = 16 << 20  # of a GPU's memory, in which blocks are gathered on their way

Restore: TypeAlias = Callable[[], tuple[int, float]]
"""Ends copies from the swap space; returns the bytes and seconds of all that were measured so far."""


class SwapMemory(Protocol):
    """SwapPlaces in host memory for what the KV memory evicts."""

    size: CacheSize
    """The places for blocks, and for states."""

    def copy_out(self, copies: Sequence[SwapCopy], memory: TierMemory) -> None:
        """Copy from the KV memory; a step that is launched later may overwrite it."""

    def copy_back(self, copies: Sequence[SwapCopy], memory: TierMemory) -> Restore:
        """Copy into the KV memory, for steps that are launched after the result was called, by any thread."""

    def let_go(self) -> None:
        """Give memory back with what is in it, where that is the memory that sleep is to give back."""


class NoSwap:
    """Stands in where there is no swap space; methods as in `SwapMemory`."""

    size = CacheSize(0, 0)

    def copy_out(self, copies: Sequence[SwapCopy], memory: TierMemory) -> None:
        """Nothing: the core has no places to copy to."""

    def copy_back(self, copies: Sequence[SwapCopy], memory: TierMemory) -> Restore:
        """Nothing to end."""
        return lambda: (0, 0.0)

    def let_go(self) -> None:
        """Nothing to give back."""


class SwapPlaces:
    """Host memory in rows of equal size, uint8 [row_bytes] each.

    take: allocates so many bytes.
    """

    def __init__(self, num_rows: int, row_bytes: int, take: Callable[[int], Tensor]) -> None:
        self._per_chunk = max(1, CHUNK_BYTES // max(1, row_bytes))
        self._chunks = [
            take(min(self._per_chunk, num_rows - begin) * row_bytes).view(-1, row_bytes)
            for begin in range(0, num_rows, self._per_chunk)
        ]

    def __getitem__(self, place: int) -> Tensor:
        return self._chunks[place // self._per_chunk][place % self._per_chunk]


class HostSwap:
    """The swap space of a CPU's worker. Its pages come from the system when they are first written.

    size: of it, in places. device, memory: those of the worker.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, size: CacheSize, device: Device, memory: TierMemory) -> None:
        self.size, self._device = size, device
        self._row_bytes = memory.blocks.block_bytes, memory.state_bytes
        self._places: tuple[SwapPlaces, SwapPlaces] | None = allocated(size, self._row_bytes, device)
        self._num_bytes, self._seconds = 0, 0.0

    def copy_out(self, copies: Sequence[SwapCopy], memory: TierMemory) -> None:
        """See `SwapMemory.copy_out`: the copies are made when it returns."""
        places = self._taken()
        for copy in copies:
            memory.of(copy).copy_into(copy.block_id, places[copy.is_state][copy.place].numpy())

    def copy_back(self, copies: Sequence[SwapCopy], memory: TierMemory) -> Restore:
        """See `SwapMemory.copy_back`: the result makes the copies, in the thread that calls it."""
        places = self._taken()

        def restore() -> tuple[int, float]:
            began = time.monotonic()
            for copy in copies:
                row = places[copy.is_state][copy.place]
                memory.of(copy).copy_in(copy.block_id, row.numpy().data)
                self._num_bytes += row.nbytes
            self._seconds += time.monotonic() - began
            return self._num_bytes, self._seconds

        return restore

    def let_go(self) -> None:
        """Give all of it back: it is taken again when something is copied."""
        self._places = None

    def _taken(self) -> tuple[SwapPlaces, SwapPlaces]:
        if self._places is None:
            self._places = allocated(self.size, self._row_bytes, self._device)
        return self._places


class PinnedSwap:
    """The swap space of a GPU's worker: pinned memory. Copies are queued among the steps, in order.

    size: of it, in places. device, memory: those of the worker.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, size: CacheSize, device: Device, memory: TierMemory) -> None:
        self.size, self._device = size, device
        self._places = allocated(size, (memory.blocks.block_bytes, memory.state_bytes), device)
        self._unmeasured: deque[tuple[int, Event, Event]] = deque()  # bytes, begin and end of copies
        self._measured = 0, 0.0

    def copy_out(self, copies: Sequence[SwapCopy], memory: TierMemory) -> None:
        """See `SwapMemory.copy_out`: the steps that are launched later run after the copies."""
        for part, own in gathered(copies, memory):
            rows = own.gather(self._ids(part))
            for copy, row in zip(part, rows, strict=True):
                self._places[copy.is_state][copy.place].copy_(row, non_blocking=True)

    def copy_back(self, copies: Sequence[SwapCopy], memory: TierMemory) -> Restore:
        """See `SwapMemory.copy_back`: nothing is left to do, as later steps run after the copies."""
        begin, num_bytes = self._device.record_event(), 0
        for part, own in gathered(copies, memory):
            rows = torch.empty(
                len(part), own.block_bytes, dtype=torch.uint8, device=self._device.torch_device
            )
            for copy, row in zip(part, rows, strict=True):
                row.copy_(self._places[copy.is_state][copy.place], non_blocking=True)
            own.scatter(self._ids(part), rows)
            num_bytes += rows.nbytes
        self._unmeasured.append((num_bytes, begin, self._device.record_event()))
        measured = self._measure()
        return lambda: measured

    def let_go(self) -> None:
        """Nothing: a GPU's worker sleeps to give the GPU's memory back."""

    def _measure(self) -> tuple[int, float]:
        """The bytes and seconds of the copies that are over."""
        total, seconds = self._measured
        while self._unmeasured and self._unmeasured[0][2].reached():
            num_bytes, begin, end = self._unmeasured.popleft()
            total, seconds = total + num_bytes, seconds + end.seconds_since(begin)
        self._measured = total, seconds
        return self._measured

    def _ids(self, copies: Sequence[SwapCopy]) -> Tensor:
        """The numbers of blocks, int64 on the device."""
        return self._device.upload([torch.tensor([copy.block_id for copy in copies])])[0]


def allocated(size: CacheSize, row_bytes: tuple[int, int], device: Device) -> tuple[SwapPlaces, SwapPlaces]:
    """The places for blocks and for states. row_bytes: of each.

    Raises:
        OSError: there is not enough memory.
    """
    blocks, states = (SwapPlaces(*each, device.pinned) for each in zip(size, row_bytes, strict=True))
    return blocks, states


def gathered(
    copies: Sequence[SwapCopy], memory: TierMemory
) -> Iterator[tuple[Sequence[SwapCopy], BlockMemory]]:
    """Copies in parts of `GATHERED_BYTES`, each of blocks alone or of states, with the memory of these."""
    for is_state in (False, True):
        own = [copy for copy in copies if copy.is_state is is_state]
        if own:
            of_them = memory.of(own[0])
            count = max(1, GATHERED_BYTES // of_them.block_bytes)
            yield from ((own[i : i + count], of_them) for i in range(0, len(own), count))


def open_swap(num_bytes: int, host_bytes: int, device: Device, memory: TierMemory) -> SwapMemory:
    """Swap space of a size, shared out between blocks and states as the KV memory is.

    host_bytes: memory of the host for each of its workers.

    Raises:
        LoadError: it holds nothing, or there is not enough memory.
    """
    if not num_bytes:
        return NoSwap()
    blocks, states = memory.blocks, memory.states
    total = blocks.num_bytes + (0 if states is None else states.num_bytes)
    num_blocks = num_bytes * blocks.num_blocks // total
    num_states = 0 if states is None else num_bytes * states.num_blocks // total
    if not num_blocks or (states is not None and not num_states):
        raise LoadError(
            f"swap_space: {num_bytes / GIB:g} GiB do not hold a block of {blocks.block_bytes:,} bytes"
            + (f" and states of {memory.state_bytes:,} bytes" if states is not None else "")
        )
    if num_bytes > host_bytes:
        raise LoadError(
            f"swap_space: {num_bytes / GIB:g} GiB for each worker, but the host has {host_bytes / GIB:.2f} GiB for "
            "each: give it less"
        )
    size = CacheSize(num_blocks, num_states)
    try:
        return PinnedSwap(size, device, memory) if device.asynchronous else HostSwap(size, device, memory)
    except (OSError, RuntimeError) as error:  # RuntimeError: PyTorch's, of memory that cannot be pinned
        raise LoadError(f"swap_space: {num_bytes / GIB:g} GiB cannot be allocated: {error}") from error
