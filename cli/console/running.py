"""The cores that this user runs on this machine: those that listen in the folder of private sockets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 2.0  # for a core to say what it serves; one that loads its model takes longer
WORKERS = "worker-"  # how the names of sockets begin on which cores wait for their workers
COLUMNS = "{:<32}{:>8}  {}"


@dataclass(frozen=True)
class RunningCore:
    """A core that listens. pid: of its process; None: unknown."""

    address: str
    pid: int | None


def running_cores() -> list[RunningCore]:
    """The cores whose sockets lie in `runtime_dir`, by address.

    Raises:
        PermissionError: that folder belongs to another user, or others can open it.
    """
    from pagewire.ipc.host.address_lock import listening
    from pagewire.ipc.wire.sockets import runtime_dir

    found = sorted(listening(runtime_dir()).items())
    return [
        RunningCore(f"ipc://{path}", pid) for path, pid in found if not Path(path).name.startswith(WORKERS)
    ]


def model_of(core: RunningCore) -> str:
    """The name of a core's model; "(loading)" if it does not answer, as while it loads one."""
    from pagewire.frontend.core.client import CoreClient

    cancelled = threading.Event()
    timer = threading.Timer(PATIENCE_SECONDS, cancelled.set)
    timer.start()
    try:
        client = CoreClient.connect(
            core.address,
            on_deltas=lambda deltas: None,
            on_dead=lambda error: None,
            name="top",
            timeout=PATIENCE_SECONDS,
            cancelled=cancelled,
        )
    except Exception:  # one that starts, ends or is of another version is listed all the same
        return "(loading)"
    finally:
        timer.cancel()
    with suppress(Exception):
        return str(client.info.served_model_names[0])
    return "(unknown)"


def table(cores: Sequence[RunningCore]) -> list[str]:
    """The cores as lines: the name of each one's socket, its process and its model."""
    names = [Path(core.address).name for core in cores]
    row = COLUMNS.replace("32", str(max(map(len, names)) + 2))
    return [
        row.format("SOCKET", "PID", "MODEL"),
        *(row.format(name, core.pid or "-", model_of(core)) for name, core in zip(names, cores, strict=True)),
    ]
