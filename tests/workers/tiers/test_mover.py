"""Blocks of memory that go to disk and come back, in a thread beside the steps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.ipc.wire.block_names import ROOT, split_names
from pagewire.ipc.wire.tier_messages import (
    BlockBack,
    BlockOut,
    BlocksMoved,
    MoveBlocks,
    TierReport,
    state_name,
)
from pagewire.workers.tiers import mover as module
from pagewire.workers.tiers.disk import DiskTier
from pagewire.workers.tiers.entry import HEADER_BYTES
from pagewire.workers.tiers.folder import TierFolder
from pagewire.workers.tiers.memory import BlockMemory, TierMemory
from pagewire.workers.tiers.mover import BlockMover

NUM_BLOCKS = 8
NAMES = [bytes([number]) * 32 for number in range(NUM_BLOCKS)]


def tensors() -> list[Tensor]:
    """Caches of two layers, of several types."""
    torch.manual_seed(7)
    return [
        torch.randn(NUM_BLOCKS, 2, 16, 4),
        torch.randn(NUM_BLOCKS, 2, 16, 3).bfloat16(),
        torch.randint(-99, 99, (NUM_BLOCKS, 1, 16, 5), dtype=torch.int8),
    ]


class Bench:
    """A tier, and what it has said."""

    def __init__(self, path: Path) -> None:
        self.memory = tensors()
        self.told = threading.Event()
        self.states = [torch.randn(NUM_BLOCKS, 3, 7), torch.randn(NUM_BLOCKS, 5)]
        memory = TierMemory.of_tensors(self.memory, self.states)
        size, state_size = memory.blocks.block_bytes, memory.state_bytes
        assert (size, state_size) == (16 * (8 * 4 + 6 * 2 + 5), 26 * 4)
        folder = TierFolder(path, bytes(32), 1 << 24, size, state_bytes=state_size)
        self.tier = DiskTier(lambda: memory, BlockMover(folder, self.told.set))
        self.names: set[bytes] = set()
        self.last = TierReport()
        self.moved: dict[int, BlocksMoved] = {}

    def move(
        self, number: int, out: list[int] | None = None, back: dict[int, int] | None = None
    ) -> list[int]:
        """Move blocks, and wait for the answer: numbers of the names that are missing. back: those, by block."""
        blocks = [BlockOut(i, NAMES[i], NAMES[i - 1] if i else ROOT) for i in out or []]
        return self.send(
            MoveBlocks(number, blocks, [BlockBack(i, NAMES[n]) for i, n in (back or {}).items()])
        )

    def send(self, message: MoveBlocks) -> list[int]:
        """Send a message, and wait for the answer: numbers of the names that are missing."""
        number = message.number
        self.tier.move(message)
        while number not in self.moved:
            assert self.told.wait(60)
            self.told.clear()
            self.hear()
        return [NAMES.index(name) for name in self.moved[number].missing]

    def hear(self) -> None:
        for report in self.tier.take_reports():
            self.names |= set(split_names(report.added))
            self.names -= set(split_names(report.removed))
            self.moved |= {moved.number: moved for moved in report.moved}
            self.last = report


def test_blocks_go_and_come_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    before = [tensor.clone() for tensor in bench.memory]
    bench.move(1, [0, 2, 5])
    assert bench.names == {NAMES[0], NAMES[2], NAMES[5]}
    for tensor in bench.memory:
        tensor.zero_()
    assert bench.move(2, back={3: 0, 1: 5}) == []
    for tensor, old in zip(bench.memory, before, strict=True):
        assert torch.equal(tensor[3], old[0]) and torch.equal(tensor[1], old[5])
        assert not tensor[[0, 2, 4, 5, 6, 7]].any()
    assert (bench.last.num_written, bench.last.num_read, bench.last.num_dropped) == (3, 2, 0)
    assert bench.last.bytes_read == 2 * BlockMemory(bench.memory).block_bytes and bench.last.read_seconds > 0
    bench.tier.close()
    assert Bench(tmp_path).tier.take_reports()[0].added == NAMES[0] + NAMES[2] + NAMES[5]


def test_what_is_copied_out_is_what_was_there(tmp_path: Path) -> None:
    """Also where the same message, or a step behind it, overwrites the block."""
    bench = Bench(tmp_path)
    before = [tensor.clone() for tensor in bench.memory]
    bench.move(1, [4])
    bench.tier.move(MoveBlocks(2, [BlockOut(1, NAMES[1], NAMES[0])], [BlockBack(1, NAMES[4])]))
    bench.move(3)
    assert bench.move(4, back={7: 1}) == []
    for tensor, old in zip(bench.memory, before, strict=True):
        assert torch.equal(tensor[1], old[4]) and torch.equal(tensor[7], old[1])


def test_what_is_not_there_is_missing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.move(1, [0])
    before = [tensor.clone() for tensor in bench.memory]
    assert bench.move(2, back={4: 3, 5: 0, 6: 7}) == [3, 7]
    for tensor, old in zip(bench.memory, before, strict=True):
        assert torch.equal(tensor[4], old[4]) and torch.equal(tensor[6], old[6])


def test_what_does_not_fit_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    monkeypatch.setattr(module, "WAITING_BYTES", 2 * BlockMemory(bench.memory).block_bytes)
    bench.move(1, [0, 1, 2, 3])
    assert bench.names == {NAMES[0], NAMES[1]} and bench.last.num_dropped == 2
    bench.move(2, [2, 3])
    assert bench.names == set(NAMES[:4])


def test_a_tier_that_forgets(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.move(1, [0, 1])
    bench.tier.forget()
    bench.move(2)
    assert not bench.names and bench.move(3, back={2: 0}) == [0]
    bench.move(4, [0])
    assert bench.names == {NAMES[0]}


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.move(1, [0])

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TierFolder, "write", refuse)
    bench.move(2, [1, 2])
    monkeypatch.undo()
    bench.move(3, [3])  # not tried for a while
    assert bench.names == {NAMES[0]} and bench.last.num_dropped == 3
    assert bench.move(4, back={5: 0}) == []


def test_states_go_and_come_back_beside_blocks(tmp_path: Path) -> None:
    bench, name = Bench(tmp_path), state_name(NAMES[2])
    before = [tensor.clone() for tensor in [*bench.memory, *bench.states]]
    out = [BlockOut(6, name, ROOT, True), BlockOut(1, NAMES[1], NAMES[0])]
    bench.send(MoveBlocks(1, out))
    assert bench.names == {name, NAMES[1]} and bench.last.num_written == 2
    for tensor in [*bench.memory, *bench.states]:
        tensor.zero_()
    assert bench.send(MoveBlocks(2, back=[BlockBack(4, NAMES[1]), BlockBack(3, name, True)])) == []
    num_caches = len(bench.memory)
    for tensor, old in zip(bench.memory, before[:num_caches], strict=True):
        assert torch.equal(tensor[4], old[1]) and not tensor[3].any()
    for tensor, old in zip(bench.states, before[num_caches:], strict=True):
        assert torch.equal(tensor[3], old[6]) and not tensor[4].any()
    assert bench.last.num_bytes == bench.last.bytes_written + 4 * HEADER_BYTES
