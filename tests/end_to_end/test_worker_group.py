"""A core with a group of two real workers, which die and hang before, in and after a collective.

The workers divide each layer, of the model and of a draft model, or are the stages of a pipeline.

The streams go on, and are those of the group that nothing happens to.
"""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq

from pagewire import LLM, AsyncLLM, LoRARequest, SamplingParams
from pagewire.engine_core.clients.access import Access
from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.core import EngineCore
from pagewire.engine_core.wiring import open_core
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.host.gate import Gate
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.sockets import bind_router
from pagewire.kernels.cpu import library
from tests.end_to_end.test_embeddings import lora, table  # noqa: F401 - fixtures
from tests.end_to_end.test_recovery import PROMPTS, Progress, collect, mixed, status, wait_for_start

FAULTY_WORKER = (sys.executable, str(Path(__file__).with_name("faulty_worker.py")))
DRAFTER = {"model": "demo", "num_speculative_tokens": 3, "quantization": "int8"}
DIVIDED: dict[str, Any] = {"tensor_parallel_size": 2, "speculative_config": DRAFTER}
FAULTS = [
    (1, "before", signal.SIGKILL),
    (0, "in", signal.SIGKILL),
    (1, "after", signal.SIGKILL),
    (0, "in", signal.SIGSTOP),
]
STAGE_FAULTS = [(1, "in", signal.SIGKILL)]
STAGED: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enable_lora": True,
    "enable_prompt_embeds": True,
    "speculative_config": {"method": "suffix"},
}
MAX_PARTED = 3  # of 24 streams of about 80 tokens, on any instruction set
Collect = Callable[[AsyncLLM, Progress | None], Awaitable[list[list[int]]]]
if os.environ.get("PAGEWIRE_TEST_ALL_FAULTS"):
    signals = (signal.SIGKILL, signal.SIGSTOP)
    FAULTS = [(rank, phase, n) for rank in (0, 1) for phase in ("before", "in", "after") for n in signals]
    # The first stage never waits for the second one.
    STAGE_FAULTS = [fault for fault in FAULTS if fault[:2] != (0, "in")]


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which faults are ordered."""
    if library.choose() is None:
        pytest.skip("without compiled kernels, ranks share no memory")
    monkeypatch.setenv("FAULT_ORDER", str(tmp_path / "order"))
    return tmp_path / "order"


@pytest.fixture(params=[DIVIDED])
def core(
    request: pytest.FixtureRequest, tmp_path: Path, order: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineCore]:
    """A core in a thread, with a group of two, for which a step that takes longer than five seconds is a hang.

    The parameter is the options that make it a group.
    """
    monkeypatch.setenv("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", "5")
    monkeypatch.setattr("pagewire.engine_core.workers.restarts.FIRST_PAUSE_SECONDS", 0.02)
    context: zmq.Context[Any] = zmq.Context()
    access = Access()
    gate = Gate(context, access.admit)
    gate.start()
    socket = bind_router(context, f"ipc://{tmp_path}/core.sock", guarded=True)
    clients = Clients(socket, 60.0, access)
    args = EngineArgs("demo", dtype="float32", num_threads=1, kv_cache_memory_bytes=32 << 20, **request.param)
    config = EngineConfig.resolve(args)
    workers = WorkerGroup(config.worker_config(), LocalLauncher(context, FAULTY_WORKER))
    core = open_core(config, workers, clients)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    yield core
    core.stop(0.0)
    core.stop(0.0)
    thread.join(60)
    assert not thread.is_alive()
    gate.stop()
    context.destroy(0)


async def collect_all(group: AsyncLLM, progress: Progress | None = None) -> list[list[int]]:
    """The tokens of all prompts, run at the same time."""
    return await asyncio.gather(*(collect(group, i, progress, mixed) for i in range(len(PROMPTS))))


async def collect_with(
    group: AsyncLLM, progress: Progress | None, adapter: LoRARequest, rows: torch.Tensor
) -> list[list[int]]:
    """The same, and the tokens of the first prompt with an adapter, and as embeddings, at the same time."""

    async def stream(prompt: Any, name: str, lora_request: LoRARequest | None) -> list[int]:
        tokens: list[int] = []
        async for output in group.generate(prompt, mixed(0), name, lora_request=lora_request):
            tokens += output.outputs[0].token_ids
        return tokens

    others = stream(PROMPTS[0], "adapter", adapter), stream({"prompt_embeds": rows}, "embeddings", None)
    streams, *more = await asyncio.gather(collect_all(group, progress), *others)
    return [*streams, *more]


async def check_fault(
    group: AsyncLLM,
    core: EngineCore,
    order: Path,
    expected: list[list[int]],
    fault: tuple[int, str, int],
    collect_all: Collect = collect_all,
) -> None:
    """Run the prompts while a fault happens; none of the workers that it ends is left."""
    rank, phase, number = fault
    progress = Progress()
    streams = asyncio.ensure_future(collect_all(group, progress))
    await progress.reach(100)
    num_starts, pids = core.worker.num_starts, core.worker.pids
    order.with_suffix(".new").write_text(f"{rank} {phase} {int(number)}")
    order.with_suffix(".new").rename(order)
    assert await streams == expected
    while order.exists():  # the fault came too late for these
        assert await collect_all(group, None) == expected
    await wait_for_start(group, num_starts + 1)
    assert not any(map(psutil.pid_exists, pids))


async def check_calls(group: AsyncLLM, order: Path) -> None:
    """Calls run on all ranks, and answer in their order. One in which a rank fails while the other waits, ends."""
    state = await status(group)
    assert state["worker_starts"] > len(FAULTS) and state["num_free_blocks"] == state["num_blocks"]
    first, second = await group.collective_rpc("model_info")
    assert first == second
    pids = [memory["process"] for memory in await group.collective_rpc("memory")]
    assert len(pids) == 2
    await group.start_profile()
    await group.stop_profile()
    await group.sleep(1)
    assert [memory["weights"] for memory in await group.collective_rpc("memory")] == [0, 0]
    order.write_text("1 before 0")
    with pytest.raises(RuntimeError, match=r"the worker was lost: .*memory is short, as ordered \(rank 1\)"):
        await group.wake_up(["weights"])
    assert await group.is_sleeping()
    await group.wake_up(["weights"])
    assert await group.is_sleeping()
    await group.wake_up(["kv_cache"])


def tokens_of_one_worker(llm: LLM) -> list[list[int]]:
    """What one worker makes of all prompts."""
    params = [mixed(i) for i in range(len(PROMPTS))]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("core", [STAGED], indirect=True)
def test_streams_outlive_the_death_of_a_stage(
    core: EngineCore,
    order: Path,
    llm: LLM,
    tmp_path: Path,
    lora: LoRARequest,  # noqa: F811
    table: torch.Tensor,  # noqa: F811
) -> None:
    alone = tokens_of_one_worker(llm)
    collect = partial(collect_with, adapter=lora, rows=table[PROMPTS[0]])

    async def main() -> None:
        async with AsyncLLM.attach(f"ipc://{tmp_path}/core.sock", timeout=None) as group:
            # The first drafts that are likely right are trials, whatever the steps took.
            params = SamplingParams(max_tokens=12, allowed_token_ids=[300], ignore_eos=True)
            async for _ in group.generate([300], params, "one"):
                pass
            assert (await status(group))["num_accepted_tokens"] > 0  # type: ignore[operator]
            *plain, adapted, embedded = expected = await collect(group, None)
            assert plain == alone and embedded == alone[0] != adapted
            for fault in STAGE_FAULTS:
                await check_fault(group, core, order, expected, fault, collect)
            first, second = await group.collective_rpc("model_info")
            assert (first["num_layers"], second["num_layers"]) == (2, 2)

    asyncio.run(main())


def test_streams_outlive_the_death_and_hang_of_a_rank_in_each_phase(
    core: EngineCore, order: Path, llm: LLM, tmp_path: Path
) -> None:
    alone = tokens_of_one_worker(llm)

    async def main() -> None:
        async with AsyncLLM.attach(f"ipc://{tmp_path}/core.sock", timeout=None) as group:
            expected = await collect_all(group)
            # Ranks add up their parts in another order than one worker does, so a draw may fall out differently.
            assert sum(map(operator.ne, expected, alone)) <= MAX_PARTED
            for fault in FAULTS:
                await check_fault(group, core, order, expected, fault)
            await check_calls(group, order)
            # One request alone is long enough for steps with drafts that no measurement forbids (`NUM_TRIALS`).
            assert await collect(group, 0, None, mixed) == expected[0]
            assert core.serving is not None
            assert core.serving.engine.scheduler.speculation.stats.num_drafts > 0
            drafters = [info["drafter"] for info in await group.collective_rpc("model_info")]
            assert drafters == ["LlamaForCausalLM"] * 2

    asyncio.run(main())
