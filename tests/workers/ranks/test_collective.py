"""Collectives: the same bits in every rank, as the ordered sum in torch has; in threads, and between processes."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.ipc.host.lifeline import wait_for_end
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.kernels.cpu import library
from pagewire.kernels.cpu.collective import SLOT_BYTES, SharedMemoryGroup, region_bytes
from pagewire.workers.ranks import meeting
from pagewire.workers.ranks.agreement import own_turn
from pagewire.workers.ranks.open import open_collective
from tests.workers.ranks import battery

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=[2, 3, 4])
def groups(request: pytest.FixtureRequest) -> Iterator[list[SharedMemoryGroup]]:
    """The ranks of a group that shares memory, in this process."""
    yield from shared(request.param)


def shared(size: int, stages: int = 1) -> Iterator[list[SharedMemoryGroup]]:
    compiled = library.choose()
    if compiled is None:
        pytest.skip("there is no compiled library")
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, region_bytes(compiled.functions, size, stages))
    ranks = [SharedMemoryGroup(compiled.functions, descriptor, rank, size, stages) for rank in range(size)]
    os.close(descriptor)
    yield ranks
    for rank in ranks:
        rank.close()


def in_all(groups: list[SharedMemoryGroup], work: Callable[[SharedMemoryGroup], object]) -> list[object]:
    """What `work` returns in each rank; they run at the same time."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def test_operations_have_the_bits_of_the_ordered_sum(groups: list[SharedMemoryGroup]) -> None:
    counts = in_all(groups, battery.run)
    assert len(set(counts)) == 1 and counts[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(
    groups: list[SharedMemoryGroup], dtype: torch.dtype
) -> None:
    width = 2880
    num_rows = 2 * SLOT_BYTES // (width * dtype.itemsize) + 3  # more than two pieces
    parts = [battery.contribution(group.rank, (num_rows, width), dtype) for group in groups]
    together = in_all(groups, lambda group: group.all_reduce(parts[group.rank].clone()))
    for row in (0, 1, num_rows // 2, num_rows - 1):
        alone = in_all(groups, lambda group, row=row: group.all_reduce(parts[group.rank][row].clone()))
        for result, whole in zip(alone, together, strict=True):
            assert isinstance(result, Tensor) and isinstance(whole, Tensor)
            assert torch.equal(result, whole[row])


def test_large_tensors_go_in_pieces(groups: list[SharedMemoryGroup]) -> None:
    parts = [battery.contribution(group.rank, (5, SLOT_BYTES // 4 + 9), torch.float32) for group in groups]
    for result in in_all(groups, lambda group: group.all_gather(parts[group.rank])):
        battery.assert_same(result, torch.cat(parts, dim=-1))  # type: ignore[arg-type]
    for result in in_all(groups, lambda group: group.broadcast(parts[group.rank].clone(), 1)):
        battery.assert_same(result, parts[1])  # type: ignore[arg-type]


def test_infinities_and_what_is_no_number_stay_in_their_places(groups: list[SharedMemoryGroup]) -> None:
    parts = [torch.zeros(100, dtype=torch.bfloat16) for _ in groups]
    parts[0][3], parts[1][3], parts[1][98] = float("inf"), float("-inf"), float("inf")
    for result in in_all(groups, lambda group: group.all_reduce(parts[group.rank].clone())):
        assert isinstance(result, Tensor)
        assert result.isnan().nonzero().tolist() == [[3]] and result.isinf().nonzero().tolist() == [[98]]


@pytest.mark.parametrize(("size", "stages"), [(2, 2), (3, 3), (4, 2)])
def test_stages_send_what_comes_to_the_next_one(size: int, stages: int) -> None:
    for groups in shared(size, stages):
        counts = in_all(groups, lambda group: battery.run_pipeline(group, stages))
        assert len(set(counts)) == 1 and counts[0]
        with pytest.raises(ValueError, match="no link from rank 1 to rank 0"):
            groups[1].send(torch.zeros(1), 0)
        with pytest.raises(ValueError, match="no parts of 5"):
            groups[0].part(5)


def test_a_stage_is_ahead_of_the_next_one() -> None:
    for groups in shared(2, 2):
        for number in range(8):  # the other rank does nothing meanwhile
            groups[0].send(torch.full((100_000,), number), 1)
        for number in range(8):
            received = groups[1].receive(torch.empty(100_000, dtype=torch.int64), 0)
            assert received.eq(number).all()


def test_ranks_load_in_turns() -> None:
    for groups in shared(4):
        events: list[tuple[int, str]] = []

        def load(group: SharedMemoryGroup, events: list[tuple[int, str]] = events) -> None:
            parallel = Parallel(rank=group.rank, size=4, turn=group.rank // 2, num_turns=2)
            with own_turn(group, parallel):
                events.append((group.rank // 2, "loads"))
            events.append((group.rank // 2, "done"))

        in_all(groups, load)
        assert [turn for turn, what in events if what == "loads"] == [0, 0, 1, 1]
        assert all(what == "done" for _, what in events[4:])


# ---------------------------------------------------------------- processes


def run_ranks(size: int, port: int, *rest: str) -> list[str]:
    """The output of each rank's process."""
    name = f"pagewire-test-{secrets.token_hex(8)}"
    command = [sys.executable, "-m", "tests.workers.ranks.rank_program"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), name, str(port), *rest],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate()[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return outputs


def test_ranks_that_wait_end_with_their_parent() -> None:
    if library.choose() is None:
        pytest.skip("there is no compiled library")
    program = f"""
import sys
from pagewire.ipc.host.lifeline import Child
command = [sys.executable, "-m", "tests.workers.ranks.rank_program"]
ranks = [Child([*command, str(rank), "2", "pagewire-test-{secrets.token_hex(8)}", "0"]) for rank in range(2)]
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert parent.stdout is not None
    lines = [parent.stdout.readline() for _ in range(4)]
    exits = [os.pidfd_open(int(line)) for line in lines if line.strip().isdecimal()]
    assert len(exits) == 2
    parent.kill()
    for exit_fd in exits:
        assert wait_for_end(exit_fd, 30_000)
        os.close(exit_fd)
    parent.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("kind", "size", "pipeline"),
    [
        ("SharedMemoryGroup", 2, ["stages=2"]),
        ("DistributedGroup", 4, ["stages=2"]),
    ],
)
def test_processes_of_one_machine(kind: str, size: int, pipeline: list[str]) -> None:
    if library.choose() is None and kind == "SharedMemoryGroup":
        pytest.skip("there is no compiled library")
    rest = ["gloo"] if kind == "DistributedGroup" else []
    outputs = run_ranks(size, 0, *rest, *pipeline)
    assert len(set(outputs)) == 1 and outputs[0].startswith(kind)


def test_processes_that_meet_at_an_address() -> None:
    outputs = run_ranks(2, free_port())
    assert len(set(outputs)) == 1 and outputs[0].startswith("DistributedGroup")


def test_a_group_of_one_has_nothing_to_do() -> None:
    group = open_collective(Parallel(), torch.device("cpu"))
    x = torch.arange(3)
    assert group.all_reduce(x) is x and group.all_gather(x) is x and group.broadcast(x, 0) is x
    group.barrier()
    group.close()


def test_ranks_of_other_rendezvous_do_not_meet() -> None:
    first, second = (f"pagewire-test-{secrets.token_hex(8)}" for _ in range(2))
    with ThreadPoolExecutor(4) as pool:
        hosts = [pool.submit(meeting.host, name, 1, name) for name in (first, second)]
        assert [meeting.visit(name) for name in (second, first)] == [(second, None), (first, None)]
        for host in hosts:
            host.result()
