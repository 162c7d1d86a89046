"""Reports of the tiers of several ranks as one: what all of them have is there, and what one lacks is missing."""

from __future__ import annotations

from random import Random

from pagewire.engine_core.workers.tier_reports import GroupTierReports
from pagewire.ipc.wire.block_names import split_names
from pagewire.ipc.wire.tier_messages import BlocksMoved, TierReport

NAMES = [Random(number).randbytes(32) for number in range(6)]


def test_one_rank_speaks_for_itself() -> None:
    report = TierReport(added=NAMES[0], num_written=3)
    assert GroupTierReports(1).merged(0, report) is report


def test_a_block_is_there_once_all_ranks_have_it() -> None:
    group = GroupTierReports(2)
    assert group.merged(0, TierReport(added=NAMES[0] + NAMES[1])) is None
    both = group.merged(1, TierReport(added=NAMES[1] + NAMES[2]))
    assert both is not None and (both.added, both.removed) == (NAMES[1], b"")
    gone = group.merged(0, TierReport(removed=NAMES[0] + NAMES[1]))
    assert gone is not None and (gone.added, gone.removed) == (b"", NAMES[1])
    assert group.merged(1, TierReport(removed=NAMES[2])) is None


def test_an_answer_waits_for_the_last_rank() -> None:
    group = GroupTierReports(3)
    assert group.merged(0, TierReport(moved=[BlocksMoved(7, [b"b"]), BlocksMoved(8)])) is None
    assert group.merged(2, TierReport(moved=[BlocksMoved(7)])) is None
    last = group.merged(1, TierReport(moved=[BlocksMoved(7, [b"a", b"b"])]))
    assert last is not None and last.moved == [BlocksMoved(7, [b"a", b"b"])]


def test_counts_are_those_of_whole_blocks_and_of_all_bytes() -> None:
    group = GroupTierReports(2)
    first = TierReport(NAMES[0], num_written=5, num_read=2, num_unreadable=1, num_dropped=4, bytes_written=50)
    first.bytes_read, first.num_bytes, first.read_seconds = 20, 40, 0.5
    second = TierReport(
        NAMES[0], num_written=3, num_read=3, num_unreadable=1, num_dropped=6, bytes_written=30
    )
    second.bytes_read, second.num_bytes, second.read_seconds = 30, 10, 0.25
    group.merged(0, first)
    merged = group.merged(1, second)
    assert merged == TierReport(NAMES[0], b"", [], 3, 2, 2, 6, 80, 50, 50, 0.5)


def test_random_reports() -> None:
    """What the core knows is, after each report, what all ranks have."""
    for seed in range(50):
        random, size = Random(seed), Random(seed).randint(2, 4)
        group, known = GroupTierReports(size), set[bytes]()
        there: list[set[bytes]] = [set() for _ in range(size)]
        for _ in range(60):
            rank = random.randrange(size)
            added = {name for name in NAMES if random.random() < 0.3}
            removed = {name for name in NAMES if random.random() < 0.2} - added
            there[rank] = (there[rank] - removed) | added
            report = group.merged(rank, TierReport(b"".join(added), b"".join(removed)))
            if report is not None:
                came, gone = set(split_names(report.added)), set(split_names(report.removed))
                assert not came & gone and (came or gone)
                known = (known - gone) | came
            assert known == set.intersection(*there)
