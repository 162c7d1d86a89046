"""The actor that runs worker processes, without Ray around it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagewire.engine_core.workers.launchers import ray_host
from pagewire.engine_core.workers.launchers.ray_host import WorkerHost

READS_KEY = "import sys, time; assert sys.stdin.read() == 'a key'; time.sleep(600)"
WAITS_FOR_LIFELINE = (
    "import os, sys; at = sys.argv.index('--lifeline'); os.read(int(sys.argv[at + 1]), 1); sys.exit(3)"
)


@pytest.fixture
def host() -> Iterator[WorkerHost]:
    host = WorkerHost()
    yield host
    for identity in ("first", "second"):
        host.end(identity, True)


def start(host: WorkerHost, identity: str) -> int:
    return host.start("tcp://127.0.0.1:1", identity, "a key", {})


def test_a_worker_is_killed_and_another_takes_its_place(
    host: WorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_host, "WORKER_PROGRAM", ("-c", READS_KEY))
    first = start(host, "first")
    with ThreadPoolExecutor() as pool:
        end = pool.submit(host.wait, "first")
        assert start(host, "second") != first
        assert end.result() == -signal.SIGKILL
        host.end("first", True)  # comes late, and means nothing to the second
        end = pool.submit(host.wait, "second")
        host.end("second", True)
        assert end.result() == -signal.SIGKILL
    assert host.wait("first") == -signal.SIGKILL


def test_many_ends_at_once_close_the_lifeline_once(host: WorkerHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "WORKER_PROGRAM", ("-c", WAITS_FOR_LIFELINE))
    for _ in range(10):
        start(host, "first")
        with ThreadPoolExecutor(8) as pool:
            for end in [pool.submit(host.end, "first", False) for _ in range(8)]:
                end.result()
        assert host.wait("first") == 3
