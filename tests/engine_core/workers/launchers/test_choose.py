"""Which launcher starts the workers, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pagewire.engine_core.workers.launchers import choose
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.engine_core.workers.launchers.ray_launcher import carried, reason
from pagewire.ipc.options import ray_cluster
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.options.ray_cluster import PLACEMENT_GROUP, bundle_of, by_node, new_group, suitable_bundles


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(choose, "GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_ray_there_is_one_clear_line(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"^[^\n]*'ray' needs Ray, [^\n]*: pip install 'pagewire\[ray\]'$"):
        choose.open_launcher(EngineArgs("demo", distributed_executor_backend="ray"), context)


def test_ray_is_the_default_in_a_placement_group_and_where_devices_are_missing(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))

    def uses_ray(size: int, **options: Any) -> bool:
        return choose.uses_ray(EngineArgs("demo", tensor_parallel_size=size, **options))

    assert not uses_ray(2) and uses_ray(3)
    assert not uses_ray(3, device="cpu") and not uses_ray(3, distributed_executor_backend="mp")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert uses_ray(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not uses_ray(2)  # "auto" is the CPU then
    monkeypatch.setenv(PLACEMENT_GROUP, "00")
    assert uses_ray(2, device="cpu") and not uses_ray(1)
    assert not uses_ray(2, distributed_executor_backend="mp")


def test_missing_devices_without_ray(
    two_gpus: None, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"this machine has 2: .*'join'.*pip install 'pagewire\[ray\]'"):
        choose.open_launcher(EngineArgs("demo", tensor_parallel_size=3), context)
    launcher = choose.open_launcher(EngineArgs("demo", tensor_parallel_size=2), context)
    assert isinstance(launcher, LocalLauncher)
    launcher.close()


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (4, {}, {"GPU": 1.0}),
        (0, {}, {"CPU": 1.0}),
        (0, {"num_threads": 8}, {"CPU": 8.0}),
        (4, {"device": "cpu", "num_threads": 8}, {"CPU": 8.0}),
        (0, {"device": "cuda"}, {"GPU": 1.0}),  # a cluster that grows gets one when it is asked for
    ],
)
def test_what_a_worker_asks_of_the_cluster(
    gpus: int, options: dict[str, Any], expected: dict[str, float]
) -> None:
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 64.0} | ({"GPU": float(gpus)} if gpus else {}))
    assert bundle_of(ray, EngineArgs("demo", **options)) == expected


def test_a_cluster_of_this_machine_alone_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never get room, while one that was joined may grow."""
    monkeypatch.setattr(ray_cluster, "_started_here", True)
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0})
    args = EngineArgs("demo", tensor_parallel_size=2, num_threads=2)
    with pytest.raises(ValueError, match=r"need 2 bundles of 2 CPU, and this machine, .*, has 2 CPU$"):
        new_group(ray, bundle_of(ray, args), args)


def test_bundles_of_a_group_that_the_program_made() -> None:
    specs = [{"CPU": 4.0}, {"GPU": 1.0, "CPU": 1.0}, {"GPU": 1.0}, {"GPU": 0.5}, {"GPU": 2.0}]
    assert suitable_bundles(specs, {"GPU": 1.0}, 3) == [1, 2, 4]
    with pytest.raises(
        ValueError, match=r"4 workers need 4 bundles of 1 GPU, but .* has 1 bundle of 4 CPU, "
    ):
        suitable_bundles(specs, {"GPU": 1.0}, 4)


def test_ranks_of_a_node_are_neighbours_and_the_first_are_beside_the_core() -> None:
    nodes = {0: "b", 1: "a", 2: "b", 3: "c", 4: "a"}
    assert by_node([0, 1, 2, 3, 4], nodes, "b") == [0, 2, 1, 4, 3]
    assert by_node([3, 4], nodes, "b") == [4, 3]


def test_what_workers_get_of_the_environment_of_the_core() -> None:
    environment = {
        "PAGEWIRE_CPU_ISA": "avx2",
        "NCCL_DEBUG": "INFO",
        "PAGEWIRE_HOST_IP": "10.0.0.1",
        "PAGEWIRE_API_KEY": "secret",
        "HOME": "/root",
    }
    assert carried(environment) == {"PAGEWIRE_CPU_ISA": "avx2", "NCCL_DEBUG": "INFO"}


def test_the_reason_of_a_loss_is_one_line() -> None:
    text = "The actor died.\n\tclass_name: WorkerHost\nThe actor is dead because its node has died.\nmore"
    assert reason(RuntimeError(text)) == "The actor is dead because its node has died."
    assert reason(
        RuntimeError("ray::start()\n  File x\nModuleNotFoundError: No module named 'pagewire'\n")
    ) == ("ModuleNotFoundError: No module named 'pagewire'")
    assert reason(TimeoutError()) == "TimeoutError"
    assert len(reason(RuntimeError("x" * 10_000))) < 500
