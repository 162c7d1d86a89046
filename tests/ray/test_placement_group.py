"""Placement groups: of a program that is a part of a Ray job, and of `initialize_ray_cluster`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from pagewire import EngineArgs, initialize_ray_cluster
from pagewire.ipc.options import ray_cluster

ARGS = EngineArgs("demo", device="cpu", tensor_parallel_size=2, num_threads=2)


@pytest.fixture
def ray(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, connected until the test is over."""
    monkeypatch.setattr(ray_cluster, "_reserved", None)
    ray = ray_cluster.connect()
    yield ray
    ray.shutdown()


def test_an_engine_in_a_placement_group_runs_its_workers_there(ray: Any) -> None:
    """No option names Ray."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 2}] * 2)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)

    @ray.remote(num_cpus=1, scheduling_strategy=strategy)
    def generate(options: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
        import psutil

        from pagewire import LLM, SamplingParams

        def parents_of_workers() -> list[str]:
            found = psutil.process_iter(["cmdline", "ppid"])
            workers = [
                other for other in found if "pagewire.workers.process.main" in (other.info["cmdline"] or ())
            ]
            return [" ".join(psutil.Process(worker.info["ppid"]).cmdline()) for worker in workers]

        tokens = []
        for parallel in ({"tensor_parallel_size": 2}, {}):
            with LLM("demo", **options, **parallel) as llm:
                output = llm.generate(
                    [[300, 400, 500]], SamplingParams(seed=1, max_tokens=20), use_tqdm=False
                )
                tokens.append(output[0].outputs[0].token_ids)
                if parallel:
                    parents = parents_of_workers()
        return tokens, parents

    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 64 << 20}
    (several, one), parents = ray.get(generate.remote(options))
    assert several == one
    assert len([parent for parent in parents if "WorkerHost" in parent]) == 2


def test_initialize_ray_cluster_reserves_places(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_cluster.PLACEMENT_GROUP not in ray_cluster.environment()
    initialize_ray_cluster(ARGS)
    given = ray_cluster.environment()
    assert given["RAY_ADDRESS"] == os.environ["RAY_ADDRESS"]
    group = ray_cluster.group_of_id(given[ray_cluster.PLACEMENT_GROUP])
    assert group.bundle_specs == [{"CPU": 2.0}] * 2
    table = ray.util.placement_group_table(group)
    assert table["state"] == "CREATED" and len(set(table["bundles_to_node_id"].values())) == 2
    # All four processors are taken, so another group finds no room.
    monkeypatch.setenv("PAGEWIRE_WORKER_START_TIMEOUT_S", "1")
    with pytest.raises(TimeoutError, match="no room within 1 s for 2 bundles of 2 CPU"):
        initialize_ray_cluster(ARGS)
