"""A core with two real workers, of which rank 1 only follows: the streams are those of a single worker."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pagewire import LLM, AsyncLLM
from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.config import EngineConfig
from pagewire.engine_core.core import EngineCore
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.options import EngineArgs
from pagewire.ipc.sockets import bind_router

from .test_recovery import PROMPTS, Progress, collect, mixed, status


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineCore]:
    """A core in a thread, with a group of two, for which a step that takes longer than ten seconds is a hang."""
    monkeypatch.setenv("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", "10")
    context: zmq.Context[Any] = zmq.Context()
    clients = Clients(bind_router(context, f"ipc://{tmp_path}/core.sock"), silence_seconds=60.0)
    args = EngineArgs(
        "demo", dtype="float32", num_threads=1, kv_cache_memory_bytes=32 << 20, tensor_parallel_size=2
    )
    config = EngineConfig.resolve(args)
    core = EngineCore(config, WorkerGroup(config.worker_config(), LocalLauncher(context)), clients)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    yield core
    core.stop(0.0)
    core.stop(0.0)
    thread.join(60)
    assert not thread.is_alive()
    context.destroy(0)


def test_streams_outlive_the_death_and_hang_of_a_rank(core: EngineCore, llm: LLM, tmp_path: Path) -> None:
    expected = [
        output.outputs[0].token_ids
        for output in llm.generate(PROMPTS, [mixed(i) for i in range(len(PROMPTS))], use_tqdm=False)
    ]

    async def main() -> None:
        async with AsyncLLM.attach(f"ipc://{tmp_path}/core.sock", timeout=None) as group:
            progress = Progress()
            tasks = [asyncio.create_task(collect(group, i, progress, mixed)) for i in range(len(PROMPTS))]
            for rank, number in ((1, signal.SIGKILL), (0, signal.SIGSTOP)):
                await progress.reach(progress.count + 200)
                os.kill(core.worker.pids[rank], number)
            assert await asyncio.gather(*tasks) == expected
            state = await status(group)
            assert state["worker_starts"] == 3 and state["num_free_blocks"] == state["num_blocks"]
            first, second = await group.collective_rpc("model_info")
            assert first == second
            await group.sleep(2)
            assert [memory["weights"] for memory in await group.collective_rpc("memory")] == [0, 0]
            await group.wake_up(["weights"])
            assert await group.is_sleeping()
            await group.wake_up(["kv_cache"])
            assert await collect(group, 0, None, mixed) == expected[0]

    asyncio.run(main())
