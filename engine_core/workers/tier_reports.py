"""What the ranks of a group say of their cold tiers, as one report: a block is there if each rank has its part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pagewire.ipc.wire.block_names import split_names
from pagewire.ipc.wire.tier_messages import BlocksMoved, TierReport


class GroupTierReports:
    """Merges the reports of all ranks since their start.

    size: number of ranks. Each has blocks of its own under the same names.
    """

    def __init__(self, size: int) -> None:
        self._names: list[set[bytes]] = [set() for _ in range(size)]
        self._latest = [TierReport() for _ in range(size)]
        self._answers: dict[int, list[BlocksMoved]] = {}  # of some ranks, by number

    def merged(self, rank: int, report: TierReport) -> TierReport | None:
        """What a rank's report changes for the group; None if nothing."""
        if len(self._names) == 1:
            return report
        removed = [name for name in split_names(report.removed) if name in self._names[rank]]
        gone = [name for name in removed if self._is_everywhere(name)]
        self._names[rank].difference_update(removed)
        added = list(split_names(report.added))
        self._names[rank].update(added)
        came = [name for name in added if self._is_everywhere(name)]
        self._latest[rank] = report
        moved = [answer for each in report.moved if (answer := self._gather(each)) is not None]
        if not (came or gone or moved):
            return None
        return self._counted(came, gone, moved)

    def _is_everywhere(self, name: bytes) -> bool:
        return all(name in names for names in self._names)

    def _gather(self, moved: BlocksMoved) -> BlocksMoved | None:
        """The answer of all ranks, once the last has come: what one of them lacks is missing."""
        answers = self._answers.setdefault(moved.number, [])
        answers.append(moved)
        if len(answers) < len(self._names):
            return None
        del self._answers[moved.number]
        return BlocksMoved(moved.number, sorted({name for each in answers for name in each.missing}))

    def _counted(self, came: Sequence[bytes], gone: Sequence[bytes], moved: list[BlocksMoved]) -> TierReport:
        """A report with the counts of all ranks: blocks that all of them have moved, and bytes of all."""

        def over(combine: Callable[[Iterable[int]], int], name: str) -> int:
            return combine(getattr(report, name) for report in self._latest)

        return TierReport(
            b"".join(came),
            b"".join(gone),
            moved,
            num_written=over(min, "num_written"),
            num_read=over(min, "num_read"),
            num_unreadable=over(sum, "num_unreadable"),
            num_dropped=over(max, "num_dropped"),
            bytes_written=over(sum, "bytes_written"),
            bytes_read=over(sum, "bytes_read"),
            num_bytes=over(sum, "num_bytes"),
            read_seconds=max(report.read_seconds for report in self._latest),
            bytes_swapped=over(sum, "bytes_swapped"),
            swap_seconds=max(report.swap_seconds for report in self._latest),
        )
