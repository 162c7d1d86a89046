"""The swap space of a worker: what is copied there comes back to the bit, and preemption changes no token."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.ipc.wire.tier_messages import MoveBlocks, SwapCopy, TierConfig, TierReport
from pagewire.workers.device.cpu import CpuDevice
from pagewire.workers.device.interface import Device
from pagewire.workers.device.kv_size import CacheSize
from pagewire.workers.errors import LoadError
from pagewire.workers.tiers import swap as module
from pagewire.workers.tiers.disk import DiskTier
from pagewire.workers.tiers.memory import TierMemory
from pagewire.workers.tiers.mover import BlockMover
from pagewire.workers.tiers.no_folder import NoFolder
from pagewire.workers.tiers.swap import HostSwap, NoSwap, PinnedSwap, open_swap
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice
from tests.workers.architectures import SERVED
from tests.workers.driver import load_runner
from tests.workers.tiers import swapped_runs
from tests.workers.tiers.test_mover import NUM_BLOCKS, tensors

SIZE = CacheSize(5, 3)


def devices() -> list[Device]:
    return [CpuDevice(), EmulatedCudaDevice()]


class SwapBench:
    """A tier with swap space alone, and what it has said."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.blocks, self.states = tensors(), [torch.randn(NUM_BLOCKS, 3, 7), torch.randn(NUM_BLOCKS, 5)]
        memory = TierMemory.of_tensors(self.blocks, self.states)
        self.row_bytes = memory.blocks.block_bytes, memory.state_bytes
        self.told = threading.Event()
        kind = PinnedSwap if device.asynchronous else HostSwap
        self.tier = DiskTier(
            lambda: memory, BlockMover(NoFolder(), self.told.set), kind(SIZE, device, memory)
        )
        self.last = TierReport()

    def all(self) -> list[Tensor]:
        return [*self.blocks, *self.states]

    def send(self, message: MoveBlocks) -> None:
        """Send a message, and wait for its answer."""
        self.tier.move(message)
        while not any(moved.number == message.number for moved in self.last.moved):
            assert self.told.wait(60)
            self.told.clear()
            for report in self.tier.take_reports():
                self.last = report


@pytest.mark.parametrize("device", devices(), ids=["host", "pinned"])
def test_blocks_and_states_go_and_come_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SwapBench(device)
    monkeypatch.setattr(module, "GATHERED_BYTES", 2 * bench.row_bytes[0])  # two blocks at a time
    before = [tensor.clone() for tensor in bench.all()]
    out = [SwapCopy(1, 4), SwapCopy(6, 0), SwapCopy(2, 2), SwapCopy(6, 1, True)]
    bench.tier.move(MoveBlocks(swap_out=out))
    for tensor in bench.all():
        tensor.zero_()
    back = [SwapCopy(3, 0), SwapCopy(5, 4), SwapCopy(0, 2), SwapCopy(7, 1, True)]
    bench.send(MoveBlocks(9, swap_back=back))
    num_caches = len(bench.blocks)
    for tensor, old in zip(bench.blocks, before[:num_caches], strict=True):
        assert torch.equal(tensor[[3, 5, 0]], old[[6, 1, 2]]) and not tensor[[1, 2, 4, 6, 7]].any()
    for tensor, old in zip(bench.states, before[num_caches:], strict=True):
        assert torch.equal(tensor[7], old[6]) and not tensor[:7].any()
    assert bench.last.moved[0].missing == []
    bench.tier.close()


@pytest.mark.parametrize("device", devices(), ids=["host", "pinned"])
def test_copying_back_is_timed_once_it_is_over(device: Device) -> None:
    bench = SwapBench(device)
    bench.tier.move(MoveBlocks(swap_out=[SwapCopy(1, 0)]))
    bench.send(MoveBlocks(1, swap_back=[SwapCopy(2, 0)]))
    num_bytes = bench.row_bytes[0]
    assert bench.last.bytes_swapped == (0 if device.asynchronous else num_bytes)  # its event was not reached
    device.record_event().wait()
    bench.send(MoveBlocks(2, swap_back=[SwapCopy(3, 0)]))
    assert bench.last.bytes_swapped == num_bytes * (1 if device.asynchronous else 2)
    bench.tier.close()


def test_a_place_may_be_used_again_in_the_same_message() -> None:
    """What goes out does so before anything comes in, and before the block that it lay in is overwritten."""
    for device in devices():
        bench = SwapBench(device)
        before = [tensor.clone() for tensor in bench.blocks]
        bench.tier.move(MoveBlocks(swap_out=[SwapCopy(0, 3)]))
        bench.send(MoveBlocks(1, swap_out=[SwapCopy(4, 1)], swap_back=[SwapCopy(4, 3), SwapCopy(7, 1)]))
        for tensor, old in zip(bench.blocks, before, strict=True):
            assert torch.equal(tensor[4], old[0]) and torch.equal(tensor[7], old[4])
        bench.tier.close()


def test_sleep_gives_host_memory_back_where_that_is_the_cache_s() -> None:
    """It is taken again when it is needed; what was there is forgotten, as the core knows."""
    for device in devices():
        bench = SwapBench(device)
        bench.tier.move(MoveBlocks(swap_out=[SwapCopy(1, 0)]))
        bench.tier.let_go()
        bench.tier.move(MoveBlocks(swap_out=[SwapCopy(2, 0)]))
        before = [tensor[2].clone() for tensor in bench.blocks]
        bench.send(MoveBlocks(1, swap_back=[SwapCopy(5, 0)]))
        assert all(torch.equal(tensor[5], old) for tensor, old in zip(bench.blocks, before, strict=True))
        bench.tier.close()


def test_chunks_hold_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    places = module.SwapPlaces(7, 48, CpuDevice().pinned)
    for place in range(7):
        places[place].fill_(place + 1)
    assert [int(places[place].sum()) for place in range(7)] == [48 * (place + 1) for place in range(7)]


def test_the_space_is_shared_out_as_the_caches_are() -> None:
    memory = TierMemory.of_tensors(tensors(), [torch.randn(4, 9)])
    total = memory.blocks.num_bytes + 4 * 36
    swap = open_swap(3 * total, 4 * total, CpuDevice(), memory)
    assert swap.size == (3 * NUM_BLOCKS, 3 * 4)
    assert isinstance(open_swap(0, 0, CpuDevice(), memory), NoSwap)
    with pytest.raises(
        LoadError, match=r"swap_space: .* do not hold a block of 784 bytes and states of 36 bytes"
    ):
        open_swap(900, 1 << 30, CpuDevice(), memory)
    with pytest.raises(LoadError, match=r"swap_space: 3 GiB for each worker, but the host has 2\.00 GiB for"):
        open_swap(3 << 30, 2 << 30, CpuDevice(), memory)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_preemption_changes_no_token(tmp_path: Path, name: str) -> None:
    """With half the blocks, all come back from swap space; lfm2 keeps states, too."""
    told = threading.Event()
    runner, ready = load_runner(
        SERVED[name].write(tmp_path), wake=told.set, tier=TierConfig(swap_bytes=1 << 22)
    )
    assert ready.num_swap_blocks > 0 and bool(ready.num_swap_states) is bool(ready.num_states)
    size, num_states = runner.config.block_size, runner.num_states
    needed = 4 * -(-(17 + swapped_runs.NUM_TOKENS) // size)
    expected = swapped_runs.run(runner, told, needed + 4, size, num_states=num_states)
    assert expected.num_preemptions == 0
    pressed = swapped_runs.run(runner, told, needed // 2, size, num_states=num_states)
    assert pressed.tokens == expected.tokens
    assert pressed.num_preemptions > 0 and pressed.num_hits > 0
    runner.tier.close()


def test_any_weights_and_code_go_with_swap_space(tmp_path: Path) -> None:
    """Nothing outlives the worker, so nobody has to tell whether another one has the same model."""
    folder = SERVED["llama"].write(tmp_path)
    tier = TierConfig(swap_bytes=1 << 22)
    with pytest.raises(LoadError, match=r"swap_space: .* GiB do not hold a block"):
        load_runner(folder, tier=TierConfig(swap_bytes=16))
    runner, _ = load_runner(folder, tier=tier, load_format="dummy")
    assert runner.tier.swap_size.num_blocks > 0
    runner.tier.close()
