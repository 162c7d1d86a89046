"""The flat batch of a step."""

from __future__ import annotations

from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.batch.flat_batch import build_batch
from pagewire.workers.batch.slots import Slots


def test_rows_lie_one_behind_the_other() -> None:
    slots = Slots(4, 100, 16, 1000)
    first, second = list(range(40)), [7, 8, 9]
    inits = [
        SlotInit(slot, tokens, len(tokens), blocks, SamplingParams(), 0)
        for slot, tokens, blocks in ((2, first, [5, 1, 3]), (0, second, [9]))
    ]
    slots.apply(StepPlan(1, [], inits))
    batch = build_batch([Row(2, 4, 31, num_samples=0), Row(0, 0, 3, num_samples=1)], slots)
    assert batch.input_ids.tolist() == first[4:35] + second
    assert batch.positions.tolist() == [*range(4, 35), 0, 1, 2]
    assert batch.attention.query_start_loc.tolist() == [0, 31, 34]
    assert batch.attention.seq_lens.tolist() == [35, 3]
    places = [5 * 16 + p if p < 16 else 16 + p - 16 if p < 32 else 3 * 16 + p - 32 for p in range(4, 35)]
    assert batch.attention.slot_mapping.tolist() == [*places, 144, 145, 146]
    assert batch.sample_rows == [1] and batch.sample_indices.tolist() == [33]


def test_states_are_read_and_written_where_rows_say() -> None:
    slots = Slots(4, 100, 16, 1000)
    tokens = list(range(40))
    slots.apply(
        StepPlan(1, [], [SlotInit(slot, tokens, 40, [slot] * 3, SamplingParams(), 0) for slot in (0, 1)])
    )
    first = Row(1, 8, 24, state=7, states=[(16, 3), (32, 5)])
    second = Row(0, 0, 2, states=[(2, 9)])
    states = build_batch([first, second], slots).states
    assert states is not None
    assert states.row_starts.tolist() == [0, 2, 3]
    assert states.spans.tolist() == [[0, 8, 7, 3], [8, 24, 3, 5], [24, 26, -1, 9]]
