"""Memory for keys and values: taken from the system ahead of its use, and no more than that."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.caches.kv import memory_of
from pagewire.workers.run import kv_memory
from tests.workers.driver import GREEDY, load_runner

BLOCKS_AHEAD = 3


def test_pages_are_populated_only_so_far_ahead_of_the_blocks_in_use(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = load_runner(llama)
    populated: dict[int, int] = {}

    def populate(tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        populated[start] = tensor.nbytes
        return True

    monkeypatch.setattr(kv_memory, "AHEAD_BYTES", BLOCKS_AHEAD * runner.block_bytes)
    monkeypatch.setattr(runner.device, "populate", populate)
    runner.free()
    runner.allocate_kv()
    tensors = memory_of(runner.kv.caches)

    def numbers_of_blocks() -> set[int]:
        """Of each tensor: how many of its first blocks were populated."""
        found = set()
        for tensor in tensors:
            end = tensor.data_ptr()
            while end in populated and end < tensor.data_ptr() + tensor.nbytes:
                end += populated[end]
            found.add((end - tensor.data_ptr()) // tensor[0].nbytes)
        return found

    assert runner.slots.num_used_blocks == 0
    assert list(runner.spare_work) and numbers_of_blocks() == {BLOCKS_AHEAD}
    assert list(runner.spare_work) == []
    runner.slots.apply(StepPlan(0, [Row(0, 0, 3)], [SlotInit(0, [1, 2, 3], 3, [5], GREEDY, seed=0)]))
    assert list(runner.spare_work) and numbers_of_blocks() == {6 + BLOCKS_AHEAD}
    runner.slots.apply(StepPlan(1, [], [SlotInit(1, [1, 2, 3], 3, [runner.num_blocks - 1], GREEDY, seed=0)]))
    assert list(runner.spare_work) and numbers_of_blocks() == {runner.num_blocks}


def test_a_device_that_cannot_populate_is_asked_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = load_runner(llama)
    asked: list[Tensor] = []

    def populate(tensor: Tensor) -> bool:
        asked.append(tensor)
        return False

    monkeypatch.setattr(runner.device, "populate", populate)
    runner.free()
    runner.allocate_kv()
    assert list(runner.spare_work) == list(runner.spare_work) == []
    assert len(asked) == 1
