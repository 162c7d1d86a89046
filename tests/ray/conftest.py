"""A Ray cluster of two nodes on loopback, with two CPUs each. `make test-ray` installs Ray and runs these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

# Read when Ray is imported, here and in the processes that tests start: stay on loopback, report nothing to
# Ray's authors, and wait for processes that a busy machine starts slowly.
os.environ |= {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_worker_register_timeout_seconds": "200",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
NODE = {
    "num_cpus": 2,
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "node_ip_address": "127.0.0.1",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster`, which `RAY_ADDRESS` names."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    os.environ["RAY_ADDRESS"] = cluster.address
    yield cluster
    del os.environ["RAY_ADDRESS"]
    cluster.shutdown()
