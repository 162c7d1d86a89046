"""Real processes, killed and stopped: no token lost, doubled or changed, and nobody else disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from pagewire import (
    LLM,
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.end_to_end.conftest import KV_BYTES, Daemon

PROMPTS = [[300 + i, 400, 500 + i] * (1 + i % 5) for i in range(24)]


SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 2,
    "maxItems": 3,
}


def sampled(seed: int, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(
        seed=seed, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


def structured(seed: int) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        max_tokens=100,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    )


def mixed(index: int) -> SamplingParams:
    """Every other request under a grammar."""
    return structured(index) if index % 2 else sampled(index)


class Progress:
    """Counts what streams have received, and wakes the task that waits for a count."""

    def __init__(self) -> None:
        self.count = 0
        self._goal = 0
        self._reached = asyncio.Event()

    def add(self, number: int) -> None:
        self.count += number
        if self.count >= self._goal:
            self._reached.set()

    async def reach(self, goal: int) -> None:
        """Wait until the count is `goal` or more."""
        self._goal = goal
        if self.count < goal:
            self._reached.clear()
            await self._reached.wait()


async def collect(
    llm: AsyncLLM,
    index: int,
    progress: Progress | None = None,
    params: Callable[[int], SamplingParams] = sampled,
) -> list[int]:
    tokens: list[int] = []
    async for output in llm.generate(PROMPTS[index], params(index), f"r{index}"):
        tokens += output.outputs[0].token_ids
        if progress is not None:
            progress.add(len(output.outputs[0].token_ids))
    return tokens


async def prompt_logprobs(llm: AsyncLLM, progress: Progress | None = None) -> list[Any]:
    """The log probabilities of a prompt, gathered from all outputs."""
    params = sampled(5)
    params.prompt_logprobs = 1
    entries: list[Any] = []
    async for output in llm.generate(list(range(300, 340)), params, "prompt logprobs"):
        entries += output.prompt_logprobs or []
        if progress is not None:
            progress.add(1)
    return entries


async def status(llm: AsyncLLM) -> dict[str, Any]:
    return await asyncio.wrap_future(llm.session.call("status"))  # type: ignore[no-any-return]


async def kill_worker(llm: AsyncLLM) -> None:
    """Kill the worker, or the next one if it is about to be replaced."""
    while (pid := (await status(llm))["worker_pid"]) is None:
        pass
    os.kill(pid, signal.SIGKILL)


async def wait_for_start(llm: AsyncLLM, number: int) -> None:
    """Wait until the worker was started `number` times; an idle one may be replaced after all requests."""
    while (await status(llm))["worker_starts"] < number:
        pass


@pytest.mark.parametrize("params", [sampled, mixed])
def test_killed_workers_change_nothing(start_daemon: Callable, params: Callable) -> None:
    daemon = start_daemon("--max-num-batched-tokens", "64")

    async def main() -> None:
        async with AsyncLLM.attach(daemon.address) as llm:
            expected = await asyncio.gather(*(collect(llm, i, None, params) for i in range(len(PROMPTS))))
            progress = Progress()
            tasks = [asyncio.create_task(collect(llm, i, progress, params)) for i in range(len(PROMPTS))]
            for kill in range(1, 3):
                await progress.reach(kill * 300)
                await kill_worker(llm)
            assert await asyncio.gather(*tasks) == expected
            await wait_for_start(llm, 2)
            state = await status(llm)
            assert state["num_free_blocks"] == state["num_blocks"]

    asyncio.run(main())


def test_streams_wait_for_starts_of_workers_and_hardly_for_pauses(
    start_daemon: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    """With nobody waiting the pause after the sixth kill would be 8 s."""
    daemon = start_daemon()
    long = partial(sampled, max_tokens=120)

    async def main() -> None:
        async with AsyncLLM.attach(daemon.address) as llm:
            expected = await asyncio.gather(*(collect(llm, i, None, long) for i in range(8)))
            progress = Progress()
            tasks = [asyncio.create_task(collect(llm, i, progress, long)) for i in range(8)]
            for kill in range(6):
                await wait_for_start(llm, kill + 1)
                await progress.reach(progress.count + 120)  # each is cleared of crashes in eight steps alone
                await kill_worker(llm)
            assert await asyncio.gather(*tasks) == expected

    asyncio.run(main())
    pauses = re.findall(
        r"starting another(?:, in ([\d.]+) s if requests wait, else in (\d+) s)?", capfd.readouterr().err
    )
    assert len(pauses) == 6
    assert max(float(awaited or 0) for awaited, _ in pauses) <= 5


def test_preemption_changes_nothing(start_daemon: Callable, llm: LLM) -> None:
    params = [mixed(i) for i in range(len(PROMPTS))]
    alone = llm.generate(PROMPTS, params, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in alone]
    finished = [output.outputs[0] for output in alone[1::2] if output.outputs[0].finish_reason == "stop"]
    assert finished
    for completion in finished:
        jsonschema.validate(json.loads(completion.text), SCHEMA)
    daemon = start_daemon("--max-model-len", "128", "--num-gpu-blocks-override", "12")
    with LLM.attach(daemon.address) as small:
        outputs = small.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        metrics = {metric.name: metric for metric in small.get_metrics()}
        assert metrics["vllm:num_preemptions"].value > 0


FRONTEND = """
import asyncio, sys
from pagewire import AsyncLLM, SamplingParams, RequestOutputKind
async def main():
    llm = AsyncLLM.attach(sys.argv[1])
    params = SamplingParams(max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate([300, 301], params):
        print(len(output.outputs[0].token_ids), flush=True)
asyncio.run(main())
"""


def test_a_killed_frontend_disturbs_nobody(start_daemon: Callable) -> None:
    daemon = start_daemon()

    async def main() -> None:
        async with AsyncLLM.attach(daemon.address) as llm:
            expected = await collect(llm, 0)
            other = subprocess.Popen([sys.executable, "-c", FRONTEND, daemon.address], stdout=subprocess.PIPE)
            assert other.stdout is not None and other.stdout.readline()
            task = asyncio.create_task(collect(llm, 0))
            other.kill()
            other.wait()
            other.stdout.close()
            assert await task == expected
            while len((await status(llm))["clients"]) > 1:
                await asyncio.sleep(0.01)
            state = await status(llm)
            assert state["running"] == 0 and state["num_free_blocks"] == state["num_blocks"]

    asyncio.run(main())


def test_a_killed_core_is_told_to_every_request(start_daemon: Callable) -> None:
    daemon = start_daemon()

    async def main() -> None:
        llm = AsyncLLM.attach(daemon.address)
        progress = Progress()
        tasks = [asyncio.create_task(collect(llm, i, progress)) for i in range(4)]
        await progress.reach(1)
        daemon.process.kill()
        for task in tasks:
            with pytest.raises(EngineDeadError):
                await task
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        llm.shutdown()

    asyncio.run(main())


def test_restarts_carry_streams_over_to_a_new_core() -> None:
    async def main() -> None:
        llm = AsyncLLM.from_engine_args(
            EngineArgs(dtype="float32", kv_cache_memory_bytes=KV_BYTES), restarts=1
        )
        expected = await asyncio.gather(*(collect(llm, i, None, mixed) for i in range(4)))
        expected_logprobs = await prompt_logprobs(llm)
        assert len(expected_logprobs) == 40
        progress, outputs = Progress(), Progress()
        tasks = [asyncio.create_task(collect(llm, i, progress, mixed)) for i in range(4)]
        with_logprobs = asyncio.create_task(prompt_logprobs(llm, outputs))
        await progress.reach(40)
        await outputs.reach(1)
        assert llm.session._spawned is not None
        os.kill(llm.session._spawned.pid, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected
        assert await with_logprobs == expected_logprobs
        llm.shutdown()

    asyncio.run(main())


def test_attached_streams_go_on_with_another_core(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"

    async def main() -> None:
        first = Daemon(address)
        llm = AsyncLLM.attach(address, reattach_timeout=60)
        expected = await asyncio.gather(*(collect(llm, i, None, mixed) for i in range(4)))
        progress = Progress()
        tasks = [asyncio.create_task(collect(llm, i, progress, mixed)) for i in range(4)]
        await progress.reach(40)
        first.process.kill()
        first.process.wait()
        second = await asyncio.to_thread(Daemon, address)
        assert await asyncio.gather(*tasks) == expected
        assert await collect(llm, 0, None, mixed) == expected[0]
        llm.shutdown()
        assert first.close() == -signal.SIGKILL and second.stop() == 0

    asyncio.run(main())


OWNER = """
import os, signal
from pagewire import LLM
llm = LLM("demo")
print(llm.llm_engine.session._spawned.pid, llm.collective_rpc("ping") is not None, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_killed_parent() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline().split()[0])
    try:
        core = psutil.Process(pid)
        processes = [core, *core.children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def test_a_second_daemon_on_one_address_is_refused(start_daemon: Callable) -> None:
    daemon = start_daemon()
    command = [sys.executable, "-m", "pagewire.cli.main", "core", "--listen", daemon.address]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and f"pid {daemon.process.pid}" in second.stderr.splitlines()[-1]
    assert daemon.stop() == 0


def test_cancelling_and_aborting_free_blocks(start_daemon: Callable) -> None:
    daemon = start_daemon()
    long = SamplingParams(max_tokens=900, ignore_eos=True)

    async def main() -> None:
        async with AsyncLLM.attach(daemon.address) as llm:
            stream = llm.generate([300], long, "a")
            await anext(stream)
            with pytest.raises(ValueError, match="in use"):
                await anext(llm.generate([300], long, "a"))
            await stream.aclose()
            stream = llm.generate([301], long, "b")
            await anext(stream)
            await llm.abort("b")
            last = [output async for output in stream][-1]
            assert last.finished and last.outputs[0].finish_reason == "abort"
            while (state := await status(llm))["running"]:
                await asyncio.sleep(0.01)
            assert state["num_free_blocks"] == state["num_blocks"]

    asyncio.run(main())
