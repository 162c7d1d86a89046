"""How running sequences are divided among the steps that are in flight in a pipeline of several stages. Pure.

Each stage runs another step, so the sequences that decode are divided into as many micro-batches as there are
stages. A sequence is in one of them: its next token depends on the one that the last stage samples, which goes to
the first stage with the next plan. A prompt that runs in chunks depends on no sample, so several of its chunks may
be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.step import PlannedStep


def micro_batch(
    running: Sequences[Sequence], stages: int, depth: int, num_in_flight: int, step: PlannedStep
) -> list[Sequence]:
    """The running sequences that the next step may run, in their order; with one stage all of them.

    Of those that decode it has no more than their share, so that the other steps have as many.

    depth: the most steps in flight. num_in_flight: those that are now; fewer than `depth`. step: what is planned of
    the next step already.
    """
    if stages == 1:
        return list(running)
    planned = set(step.sequences)
    num_planned = sum(row.num_tokens - len(row.drafts) == 1 and row.num_samples > 0 for row in step.rows)
    num_sampling = sum(sequence.num_pending > 0 for sequence in running if sequence not in planned)
    num_ready = num_planned + sum(decodes(sequence) for sequence in running if sequence not in planned)
    share = min(-(-(num_sampling + num_ready) // depth), -(-num_ready // (depth - num_in_flight)))
    share -= num_planned
    chosen = []
    for sequence in running:
        if sequence.num_pending or sequence in planned:
            continue
        if decodes(sequence):
            share -= 1
            if share < 0:
                continue
        chosen.append(sequence)
    return chosen


def decodes(sequence: Sequence) -> bool:
    """True if the next step of a sequence can sample its next token from the last one."""
    return not sequence.num_pending and sequence.num_to_compute == 1
