"""The places of ranks in their group, and the launcher that the options ask for."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from pagewire.engine_core.workers.launchers import choose
from pagewire.engine_core.workers.launchers.choose import join_address, open_launcher
from pagewire.engine_core.workers.launchers.join import JoinLauncher, reachable
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.engine_core.workers.places import places
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.worker_messages import Parallel, WorkerHello


def hellos(*machines: str) -> list[WorkerHello]:
    return [WorkerHello(1, 2, machine, f"host-{i}", 100 + i) for i, machine in enumerate(machines)]


def test_ranks_of_one_machine_share_memory() -> None:
    first, second = places(hellos("a", "a"), "name", Parallel(size=2))
    assert first == Parallel(0, 2, 0, 2, "name")
    assert second == Parallel(1, 2, 1, 2, "name")
    assert not places(hellos("a", "a"), "name", Parallel(size=2, shared_memory=False))[0].shared_memory


def test_ranks_of_several_machines_meet_at_rank_0() -> None:
    found = places(hellos("a", "b", "a"), "name", Parallel(size=3))
    assert [(place.local_rank, place.local_size) for place in found] == [(0, 2), (0, 1), (1, 2)]
    assert {(place.host, place.port, place.shared_memory) for place in found} == {("host-0", 100, False)}


def test_ranks_of_a_machine_load_in_turns() -> None:
    found = places(hellos(*"aaabb"), "name", Parallel(size=5, max_loading=2))
    assert [place.turn for place in found] == [0, 0, 1, 0, 0] and {place.num_turns for place in found} == {2}
    assert {place.num_turns for place in places(hellos(*"aaabb"), "name", Parallel(size=5))} == {1}


def test_a_group_of_one_meets_no_other() -> None:
    assert places(hellos("a"), "name", Parallel()) == [Parallel()]


def opened(**options: Any) -> object:
    """The kind of launcher for these options."""
    context: zmq.Context[Any] = zmq.Context()
    launcher = None
    try:
        launcher = open_launcher(EngineArgs.from_kwargs(options), context)
        return type(launcher)
    finally:
        if launcher is not None:
            launcher.close()
        context.destroy(0)


def gpus(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int) -> None:
    """Make this machine one with `count` GPUs."""
    for i in range(count):
        (folder / str(i)).mkdir()
    monkeypatch.setattr(choose, "GPUS", folder)


def test_workers_are_processes_of_this_machine_if_it_has_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, tmp_path / "none", 0)
    assert opened(tensor_parallel_size=8) is LocalLauncher
    (tmp_path / "two").mkdir()
    gpus(monkeypatch, tmp_path / "two", 2)
    assert opened(tensor_parallel_size=2) is LocalLauncher
    assert opened(tensor_parallel_size=4, device="cpu") is LocalLauncher
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 takes a GPU for each worker, .* has 2"):
        opened(tensor_parallel_size=4, distributed_executor_backend="mp")


def test_workers_join_where_the_options_or_the_environment_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"join_address": "tcp://127.0.0.1:0", "join_key": str(tmp_path / "key")}
    assert opened(distributed_executor_backend="join", **options) is JoinLauncher
    assert join_address() == "tcp://127.0.0.1:5710"
    assert reachable("tcp://0.0.0.0:5710") == f"tcp://{socket.gethostname()}:5710"
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the workers' own port is the next free one
        monkeypatch.setenv("PAGEWIRE_PORT", str(taken.getsockname()[1]))
        launcher = JoinLauncher("tcp://127.0.0.1:0", tmp_path / "key", 2)
        assert int(launcher.listener.address.rpartition(":")[2]) > taken.getsockname()[1]
        launcher.close()
    monkeypatch.setenv("PAGEWIRE_HOST_IP", "10.0.0.7")
    monkeypatch.setenv("PAGEWIRE_PORT", "6000")
    assert join_address() == "tcp://10.0.0.7:6000"
    monkeypatch.setenv("PAGEWIRE_PORT", "70000")
    with pytest.raises(ValueError, match="PAGEWIRE_PORT must be a port, got '70000'"):
        join_address()
