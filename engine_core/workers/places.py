"""The places of worker processes in their group, by the machines that they run on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from pagewire.ipc.wire.worker_messages import Parallel, WorkerHello


def places(hellos: Sequence[WorkerHello], rendezvous: str, group: Parallel) -> list[Parallel]:
    """The place of each rank.

    hellos: of all ranks, in their order. rendezvous: the name under which they meet.
    group: what is the same for all of them.
    """
    if len(hellos) == 1:
        return [group]
    machines = [hello.machine for hello in hellos]
    sizes = Counter(machines)
    apart = len(sizes) > 1
    at_once = group.max_loading or len(hellos)
    found = []
    for rank, machine in enumerate(machines):
        local_rank = machines[:rank].count(machine)
        place = msgspec.structs.replace(
            group,
            rank=rank,
            local_rank=local_rank,
            local_size=sizes[machine],
            rendezvous=rendezvous,
            host=hellos[0].host if apart else "",
            port=hellos[0].port if apart else 0,
            shared_memory=group.shared_memory and not apart,
            turn=local_rank // at_once,
            num_turns=-(-max(sizes.values()) // at_once),
        )
        found.append(place)
    return found
