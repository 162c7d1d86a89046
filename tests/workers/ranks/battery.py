"""Operations of a collective with known results, for each rank to run."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.workers.ranks.agreement import from_rank
from pagewire.workers.ranks.interface import Collective

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
LENGTHS = (1, 7, 64, 1000, 70_001)


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank brings: the same numbers in every process, of which sums round differently in other orders."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)


def ordered_sum(parts: list[Tensor]) -> Tensor:
    """The oracle of `all_reduce`."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def run(group: Collective) -> int:
    """Run all operations and compare their results, to the bit; returns how many there were."""
    count = 0
    for dtype in DTYPES:
        for length in LENGTHS:
            for shape in ((length,), (3, length)):
                check(group, shape, dtype)
                count += 3
    # Not contiguous, and empty.
    parts = [contribution(rank, (64, 48), torch.bfloat16) for rank in range(group.size)]
    assert_same(group.all_reduce(parts[group.rank].T), ordered_sum(parts).T)
    assert group.all_gather(torch.empty(0, 5)).shape == (0, 5 * group.size)
    contents = [bytes([rank]) * (1 + 100 * rank) for rank in range(group.size)]
    for source, content in enumerate(contents):
        assert from_rank(source, contents[group.rank], group, torch.device("cpu")) == content
    for _ in range(200):
        group.barrier()
    return count


def check(group: Collective, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [contribution(rank, shape, dtype) for rank in range(group.size)]
    own = parts[group.rank]
    assert_same(group.all_gather(own.clone()), torch.cat(parts, dim=-1))
    assert_same(group.all_reduce(own.clone()), ordered_sum(parts))
    source = shape[-1] % group.size
    assert_same(group.broadcast(own.clone(), source), parts[source])


def run_pipeline(group: Collective, stages: int) -> int:
    """Send from stage to stage, and run all operations within each; returns how many there were.

    A rank sends more at once than the next one has begun to receive.
    """
    shards = group.size // stages
    part = group.part(shards)
    assert (part.rank, part.size) == (group.rank % shards, shards)
    count = 0 if shards == 1 else run(part)
    shapes = [(1, 64), (0, 8), (5, 1000), (3000, 300), (2, 7)]
    for number, dtype in enumerate((torch.bfloat16, torch.float32)):
        sent = [contribution(number, shape, dtype) + group.rank % shards for shape in shapes]
        for own in sent:
            if group.rank >= shards:
                assert_same(group.receive(torch.empty_like(own), group.rank - shards), own)
            if group.rank + shards < group.size:
                group.send(own, group.rank + shards)
            count += 1
    group.barrier()
    return count


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype and result.shape == expected.shape
    assert torch.equal(result, expected)
