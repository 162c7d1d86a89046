"""How sizes are divided over the ranks of a group: in contiguous spans, as even as the unit of division allows.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.errors import LoadError

UNITS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Widths are divided between groups of quantised weights (of 16 to 128 columns) where they can be."""


def span(count: int, rank: int, size: int) -> range:
    """The share of a rank of `count` things: the first ranks have one more if they do not divide evenly."""
    least, more = divmod(count, size)
    start = rank * least + min(rank, more)
    return range(start, start + least + (rank < more))


def scaled(units: range, width: int) -> range:
    """The places of units that are `width` wide each."""
    return range(units.start * width, units.stop * width)


def width_unit(width: int, size: int) -> int:
    """The unit in which a width is divided over `size` ranks.

    The largest of `UNITS` that gives every rank as much, down to 16; else the largest that gives every rank some.

    Raises:
        LoadError: there are more ranks than places.
    """
    if width < size:
        raise LoadError(f"it has a width of {width}; up to {width} ranks work")
    even = (unit for unit in UNITS if unit >= 16 and width % (unit * size) == 0)
    return next(even, next(unit for unit in UNITS if width % unit == 0 and width // unit >= size))


def width_span(width: int, rank: int, size: int) -> range:
    """The share of a rank of the width of a feed-forward layer; raises as `width_unit`."""
    unit = width_unit(width, size)
    return scaled(span(width // unit, rank, size), unit)


def width_spans(width: int, size: int) -> tuple[range, ...]:
    """The shares of all ranks; raises as `width_unit`."""
    return tuple(width_span(width, rank, size) for rank in range(size))


def stage_layers(num_layers: int, parallel: Parallel) -> range:
    """The numbers of the layers that the stage of a rank has.

    Raises:
        LoadError: there are more stages than layers, or `Parallel.layers` is of another number of layers.
    """
    if not parallel.layers:
        if num_layers < parallel.stages:
            raise LoadError(
                f"{num_layers} layers cannot be divided over {parallel.stages} stages: "
                f"pipeline_parallel_size up to {num_layers} works"
            )
        return span(num_layers, parallel.stage, parallel.stages)
    if sum(parallel.layers) != num_layers:
        raise LoadError(
            f"PAGEWIRE_PP_LAYER_PARTITION={','.join(map(str, parallel.layers))} has {sum(parallel.layers)} layers, "
            f"and the model {num_layers}"
        )
    ends = pairwise(accumulate(parallel.layers, initial=0))
    return [range(first, last) for first, last in ends][parallel.stage]


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer: each KV head serves as many query heads."""

    num: int
    num_kv: int

    @property
    def sizes(self) -> list[int]:
        """The numbers of ranks, from 2, over which the heads can be divided.

        A rank has whole KV heads with all their query heads. If there are fewer KV heads than ranks, each of them
        is on several ranks, which have some of its query heads each.
        """
        most = self.num_kv * (self.num // self.num_kv)
        return [n for n in range(2, most + 1) if n <= self.num_kv or n % self.num_kv == 0]

    def share(self, rank: int, size: int) -> tuple[range, range]:
        """The query heads and the KV heads of a rank.

        Raises:
            LoadError: they cannot be divided over `size` ranks; the text names the numbers that work.
        """
        if size != 1 and size not in self.sizes:
            works = ", ".join(map(str, self.sizes)) or "none"
            raise LoadError(
                f"it has {self.num} attention heads, with {self.num_kv} of keys and values; numbers of ranks that "
                f"work: {works}"
            )
        per_kv = self.num // self.num_kv
        if size <= self.num_kv:
            kv = span(self.num_kv, rank, size)
            return scaled(kv, per_kv), kv
        repeats = size // self.num_kv
        head, place = divmod(rank, repeats)
        within = span(per_kv, place, repeats)
        return range(head * per_kv + within.start, head * per_kv + within.stop), range(head, head + 1)
