"""A check of the operations of a group: at the start of ranks on GPUs, and by `pagewire doctor --distributed`."""

from __future__ import annotations

import torch

from pagewire.kernels.cpu.collective import ordered_sum
from pagewire.workers.ranks.interface import Collective


def check(group: Collective, device: torch.device) -> None:
    """Compare sums, concatenations and broadcasts of random numbers with their results in torch, to the bit.

    Raises:
        RuntimeError: one differs.
    """
    for dtype in (torch.float32, torch.bfloat16):
        for length in (3, 5000, 200_000):
            parts = [part(rank, length, dtype).to(device) for rank in range(group.size)]
            own = parts[group.rank]
            results = {
                "sum": (group.all_reduce(own.clone()), ordered_sum(parts)),
                "concatenation": (group.all_gather(own.clone()), torch.cat(parts)),
                "broadcast": (group.broadcast(own.clone(), group.size - 1), parts[-1]),
            }
            for name, (result, expected) in results.items():
                if not torch.equal(result, expected):
                    raise RuntimeError(
                        f"rank {group.rank}: the {name} of {length} numbers of {dtype} is wrong"
                    )


def part(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The random numbers of a rank, the same in every process."""
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)
