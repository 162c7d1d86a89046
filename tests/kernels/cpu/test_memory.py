"""Memory of weights and caches."""

from __future__ import annotations

import math
import mmap
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from pagewire.kernels.cpu.arena import LARGE_PAGE, MADV_POPULATE_WRITE, Reserve
from pagewire.kernels.cpu.memory import ALIGNMENT, CHUNK, forget_mapped_files, populate, reserved, zeros


def test_tensors_are_zero_aligned_and_apart() -> None:
    shapes = [(3,), (0,), (1 << 20, 3), (CHUNK // 4 - 1,), (7, 5), (CHUNK,), (CHUNK // 4,), (1,)]
    tensors = [zeros(shape, dtype) for shape in shapes for dtype in (torch.bfloat16, torch.float32)]
    for number, tensor in enumerate(tensors, 1):
        assert not tensor.any() and tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors, 1):
        assert (tensor == number).all()
    assert [tuple(tensor.shape) for tensor in tensors[::2]] == shapes


def test_a_tensor_outlives_its_neighbours() -> None:
    kept = zeros((1000,), torch.float32)
    for _ in range(20):
        zeros((CHUNK // 3,), torch.uint8).fill_(1)
    assert not kept.any()


def test_what_is_too_much_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError)):
        zeros((1 << 60,), torch.float32)


def can_populate() -> bool:
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(MADV_POPULATE_WRITE)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_populate(), reason=f"Linux {platform.release()} has no MADV_POPULATE_WRITE")
def test_pages_are_there_before_they_are_written() -> None:
    tensors = [zeros((CHUNK,), torch.uint8) for _ in range(2)]
    tensors[0][0] = 7
    before = psutil.Process().memory_info().rss
    assert populate(tensors[0]) and populate(tensors[1][: CHUNK // 2])
    grown = psutil.Process().memory_info().rss - before
    whole = CHUNK + CHUNK // 2
    assert whole - LARGE_PAGE <= grown <= whole + 2 * LARGE_PAGE  # and what else happens
    assert tensors[0][0] == 7 and not any(tensor[1:].any() for tensor in tensors)


def test_tensors_are_cut_from_a_reserve_and_the_rest_is_given_back() -> None:
    reserve = Reserve(CHUNK)
    start = reserve.region.address
    with reserved(reserve):
        inside = [zeros((size,), torch.uint8) for size in (5, 3 * LARGE_PAGE, 64)]
        outside = zeros((CHUNK,), torch.uint8)
        small = zeros((64,), torch.uint8)
    later = zeros((64,), torch.uint8)
    places = [tensor.data_ptr() - start for tensor in (*inside, outside, small, later)]
    assert places[:3] == [0, 64, 64 + 3 * LARGE_PAGE]
    assert all(not 0 <= place < CHUNK for place in (places[3], places[5])) and 0 <= places[4] < CHUNK
    for tensor in inside:
        assert not tensor.any()
        tensor.fill_(1)
    reserve.end(4 * LARGE_PAGE)
    whole = torch.frombuffer(reserve.region.memory, dtype=torch.uint8)[reserve.region.offset :][:CHUNK]
    assert all(tensor.all() for tensor in inside) and whole.sum() == sum(tensor.sum() for tensor in inside)


def test_taking_memory_imports_no_torch() -> None:
    program = "import sys; import pagewire.kernels.cpu.arena; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def mapped(path: Path, size: int) -> torch.Tensor:
    """A file of `size` float32 as transformers would map it."""
    torch.arange(size, dtype=torch.float32).numpy().tofile(path)
    return torch.from_file(str(path), shared=False, size=size)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_mapped_files_are_forgotten_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    size = 1 << 20
    kept, written = mapped(tmp_path / "blobs" / "a", size), mapped(tmp_path / "model" / "b", size)
    (tmp_path / "model" / "a").symlink_to("../blobs/a")
    elsewhere = mapped(tmp_path / "c", size)
    written[7] = -1
    wanted = [x.sum().item() for x in (kept, written, elsewhere)]

    def resident(path: Path) -> int:
        text = Path("/proc/self/smaps").read_text()
        return int(text.split(str(path))[1].split("Rss:")[1].split()[0]) << 10

    assert resident(tmp_path / "blobs" / "a") == 4 * size
    forget_mapped_files(tmp_path / "model")
    assert resident(tmp_path / "blobs" / "a") == 0
    assert resident(tmp_path / "model" / "b") >= 4096 and resident(tmp_path / "c") == 4 * size
    assert [x.sum().item() for x in (kept, written, elsewhere)] == wanted
    assert kept[7] == 7 and written[7] == -1 and math.isfinite(wanted[0])
    forget_mapped_files(tmp_path / "nowhere")
