"""How running sequences are divided among the steps that are in flight in a pipeline of several stages. Pure.

Each stage runs another step, so the sequences that decode are divided into as many micro-batches as there are
stages. A sequence is in one of them: its next token depends on the one that the last stage samples, which goes to
the first stage with the next plan. A prompt that runs in chunks depends on no sample, so several of its chunks may
be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from pagewire.engine_core.schedule.sequence import Sequence


def micro_batch(running: Sequences[Sequence], stages: int, depth: int, num_in_flight: int) -> list[Sequence]:
    """The running sequences that the next step may run, in their order; with one stage all of them.

    Of those that decode it has no more than their share, so that the other steps have as many.

    depth: the most steps in flight. num_in_flight: those that are now; fewer than `depth`.
    """
    if stages == 1:
        return list(running)
    num_sampling = sum(sequence.num_pending > 0 for sequence in running)
    num_ready = sum(is_ready(sequence) for sequence in running)
    share = min(-(-(num_sampling + num_ready) // depth), -(-num_ready // (depth - num_in_flight)))
    chosen = []
    for sequence in running:
        if sequence.num_pending:
            continue
        if is_ready(sequence):
            share -= 1
            if share < 0:
                continue
        chosen.append(sequence)
    return chosen


def is_ready(sequence: Sequence) -> bool:
    """True if the next step of a sequence can sample its next token from the last one."""
    return not sequence.num_pending and sequence.decodes
