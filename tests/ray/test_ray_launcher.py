"""An engine whose workers run in a Ray cluster: workers, actors and nodes are killed, and the streams go on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewire import LLM, AsyncLLM
from tests.end_to_end.conftest import KV_BYTES, Daemon
from tests.end_to_end.test_recovery import PROMPTS, Progress, collect, mixed, status
from tests.ray.conftest import NODE

ON_RAY = ("--distributed-executor-backend", "ray", "--tensor-parallel-size", "2", "--num-threads", "2")


def workers() -> list[psutil.Process]:
    """The worker processes of this machine that are children of actors."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.NoSuchProcess):
            if "pagewire.workers.process.main" in (process.info["cmdline"] or ()):
                parent = process.parent()
                if parent is not None and "WorkerHost" in " ".join(parent.cmdline()):
                    found.append(process)
    return found


@pytest.fixture
def daemon(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", "10")
    daemon = Daemon(f"ipc://{tmp_path}/core.sock", *ON_RAY)
    yield daemon
    assert daemon.stop() == 0


def test_streams_outlive_workers_actors_and_nodes(cluster: Any, daemon: Daemon) -> None:
    with LLM("demo", dtype="float32", kv_cache_memory_bytes=KV_BYTES) as llm:
        outputs = llm.generate(PROMPTS, [mixed(i) for i in range(len(PROMPTS))], use_tqdm=False)
        expected = [output.outputs[0].token_ids for output in outputs]

    async def main() -> None:
        async with AsyncLLM.attach(daemon.address, timeout=None) as llm:
            progress = Progress()
            tasks = [asyncio.create_task(collect(llm, i, progress, mixed)) for i in range(len(PROMPTS))]
            await progress.reach(100)
            first, second = workers()
            assert first.environ()["RAY_RAYLET_PID"] != second.environ()["RAY_RAYLET_PID"]  # one on each node
            actor = first.parent()
            assert actor is not None
            actor.kill()
            await progress.reach(progress.count + 200)
            workers()[0].suspend()  # a hang
            assert await asyncio.gather(*tasks) == expected
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
            cluster.add_node(**NODE)  # where the lost rank goes
            while (await status(llm))["worker_starts"] < 4:  # or one more: Ray may not have noticed yet
                assert await collect(llm, 0, None, mixed) == expected[0]
            assert await collect(llm, 0, None, mixed) == expected[0]

    asyncio.run(main())
