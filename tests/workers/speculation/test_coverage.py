"""What a drafter's cache holds of slots and blocks, operation by operation."""

from __future__ import annotations

from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.batch.slots import Slots
from pagewire.workers.speculation.coverage import Coverage
from tests.workers.driver import GREEDY


class Cache:
    """Slots of blocks of 4 tokens, with the coverage of a drafter that computes what it lacks."""

    def __init__(self) -> None:
        self.slots = Slots(max_num_seqs=3, max_model_len=32, block_size=4, vocab_size=100)
        self.coverage = Coverage(self.slots, num_blocks=16)

    def apply(self, rows: list[Row], inits: list[SlotInit] | None = None) -> None:
        """Apply a plan, as a runner does."""
        plan = StepPlan(0, rows, inits or [])
        self.slots.apply(plan)
        self.coverage.apply(plan)

    def add(self, slot: int, token_ids: list[int], block_ids: list[int], start: int = 0) -> None:
        """A sequence for a slot, cached up to `start`."""
        init = SlotInit(slot, token_ids, len(token_ids), block_ids, GREEDY, 0)
        self.apply([Row(slot, start, len(token_ids) - start, num_samples=1)], [init])

    def append(self, slot: int, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.slots.append(slot, token_id)

    def catch_up(self, slot: int) -> int:
        """Compute all tokens of a slot; returns the first that was missing."""
        first = self.coverage.first_missing(slot)
        self.coverage.extend(slot, int(self.slots.num_tokens[slot]))
        return first


def test_what_was_computed_is_held_but_for_the_last_token() -> None:
    cache = Cache()
    cache.add(0, [1, 2, 3, 4, 5], [7, 3])
    assert cache.catch_up(0) == 0
    assert cache.coverage.first_missing(0) == 4, "its logits are wanted"
    cache.append(0, [6, 7])
    assert cache.catch_up(0) == 5


def test_drafts_are_held_as_far_as_they_were_right() -> None:
    cache = Cache()
    cache.add(0, [1, 2, 3], [7, 3])
    cache.catch_up(0)
    cache.coverage.keep_drafts(0, [4, 5, 6])
    cache.append(0, [4, 5, 9])
    assert cache.catch_up(0) == 5
    assert cache.coverage.first_missing(0) == 5, "drafts are looked at once"


def test_what_lies_behind_the_slots_blocks_is_not_held() -> None:
    cache = Cache()
    cache.add(0, [1, 2, 3, 4], [7])
    cache.append(0, [5])
    assert cache.catch_up(0) == 0
    cache.coverage.keep_drafts(0, [6])
    cache.apply([Row(0, 4, 1, [8])])
    cache.append(0, [6, 7])
    assert cache.catch_up(0) == 4


def test_full_blocks_are_held_for_all_that_share_them() -> None:
    cache = Cache()
    cache.add(0, list(range(10)), [7, 3, 4])
    cache.catch_up(0)
    cache.add(1, list(range(8)) + [50, 51], [7, 3, 5], start=8)
    assert cache.catch_up(1) == 8
    cache.add(2, list(range(9)), [7, 3, 6], start=4)
    assert cache.catch_up(2) == 4, "block 3 was given out anew"


def test_a_block_that_is_given_out_again_is_not_held() -> None:
    cache = Cache()
    cache.add(0, list(range(9)), [7, 3, 4])
    cache.catch_up(0)
    cache.add(1, list(range(20, 25)), [7, 5])
    assert cache.catch_up(1) == 0
    cache.apply([Row(1, 5, 3, [3])])
    cache.append(1, [30, 31, 32, 33, 34, 35])
    assert cache.catch_up(1) == 5
