"""What happens to others when a process is killed or stopped: prints figures, exits 1 if a token is wrong.

    python -m benchmarks.faults workers      # 64 requests, the worker killed three times
    python -m benchmarks.faults frontends    # three frontends at once: one killed, one stopped for a while
    python -m benchmarks.faults random --faults 20 --seed 1    # 16 streams, and one fault after the other

Starts a core of its own on the demo model in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

from benchmarks.daemon import running_core, status
from pagewire import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

NUM_STREAMS, KV_BYTES = 16, 64 << 20  # beside random faults
PROMPTS = [[300 + i, 400, 500 + i] * (1 + i % 7) for i in range(64)]

BLOCKING_FRONTEND = """
import sys
from pagewire import LLM, SamplingParams
params = [SamplingParams(seed=i, max_tokens=900, ignore_eos=True) for i in range(8)]
LLM.attach(sys.argv[1]).generate([[300 + i, 9] for i in range(8)], params, use_tqdm=False)
"""

STREAMING_FRONTEND = """
import asyncio, json, sys, time
from pagewire import AsyncLLM, RequestOutputKind, SamplingParams
async def one(llm, index):
    tokens = []
    params = SamplingParams(seed=index, max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate([300 + index, 7], params):
        tokens += output.outputs[0].token_ids
    return tokens
async def main():
    llm = AsyncLLM.attach(sys.argv[1])
    print(json.dumps(await asyncio.gather(*(one(llm, i) for i in range(8)))), flush=True)
asyncio.run(main())
"""


async def collect(llm: AsyncLLM, index: int, progress: list[int]) -> list[int]:
    """One seeded request to its end."""
    params = SamplingParams(seed=index, max_tokens=100, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    tokens: list[int] = []
    async for output in llm.generate(PROMPTS[index], params):
        tokens += output.outputs[0].token_ids
        progress[0] += len(output.outputs[0].token_ids)
    return tokens


async def kill_workers(address: str) -> bool:
    """64 requests undisturbed, then again with three kills."""
    async with AsyncLLM.attach(address) as llm:
        expected = await asyncio.gather(*(collect(llm, i, [0]) for i in range(64)))
        await llm.reset_prefix_cache()
        begin, progress = time.perf_counter(), [0]
        tasks = [asyncio.create_task(collect(llm, i, progress)) for i in range(64)]
        for kill in range(1, 4):
            while progress[0] < kill * 1500:
                await asyncio.sleep(0.001)
            pid = (await status(llm))["worker_pid"]
            os.kill(pid, signal.SIGKILL)
            print(f"killed worker {pid} after {progress[0]} tokens")
        outputs = await asyncio.gather(*tasks)
        state = await status(llm)
    equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
    print(f"{equal} of 64 outputs equal to the undisturbed run, {time.perf_counter() - begin:.1f} s")
    print(
        f"worker starts {state['worker_starts']}, free blocks {state['num_free_blocks']} of {state['num_blocks']}"
    )
    return equal == 64 and state["num_free_blocks"] == state["num_blocks"]


async def mid_stream(llm: AsyncLLM, pid: int) -> None:
    """Wait until the frontend of process `pid` has requests, and tokens have come since."""
    first = None
    while True:
        state = await status(llm)
        if any(client["pid"] == pid and client["requests"] for client in state["clients"]):
            first = state["num_output_tokens"] if first is None else first
            if state["num_output_tokens"] > first + 100:
                return
        await asyncio.sleep(0.001)


async def disturb_frontends(address: str, stop_seconds: float) -> bool:
    """An `LLM` killed, an `AsyncLLM` stopped and continued, and one that must notice nothing, all at once."""
    with LLM.attach(address) as llm:
        params = SamplingParams(seed=1, max_tokens=500, ignore_eos=True)
        expected = llm.generate([300, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    killed, stopped = (
        subprocess.Popen([sys.executable, "-c", program, address], stdout=subprocess.PIPE, text=True)
        for program in (BLOCKING_FRONTEND, STREAMING_FRONTEND)
    )
    assert stopped.stdout is not None
    gaps, tokens, last = [], [], None
    async with AsyncLLM.attach(address) as watcher:
        params.output_kind = RequestOutputKind.DELTA
        await asyncio.gather(*(mid_stream(watcher, process.pid) for process in (killed, stopped)))
        stopped.send_signal(signal.SIGSTOP)
        killed.kill()
        begin = time.perf_counter()
        whole = True
        while time.perf_counter() - begin < stop_seconds:
            tokens, last = [], None
            async for output in watcher.generate([300, 7], params):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
                tokens += output.outputs[0].token_ids
            whole &= tokens == expected
        stopped.send_signal(signal.SIGCONT)
        late = json.loads(await asyncio.to_thread(stopped.stdout.readline))
        killed.wait()
        stopped.wait()
        while len((state := await status(watcher))["clients"]) > 1:
            await asyncio.sleep(0.01)
    print(
        f"watcher: {len(gaps)} gaps between tokens, slowest {1e3 * max(gaps):.1f} ms, all tokens there: {whole}"
    )
    print(f"stopped for {stop_seconds:.0f} s, then got {[len(tokens) for tokens in late]} of 900 tokens each")
    print(f"free blocks {state['num_free_blocks']} of {state['num_blocks']}, running {state['running']}")
    return (
        whole
        and all(len(tokens) == 900 for tokens in late)
        and state["num_free_blocks"] == state["num_blocks"]
    )


class Streams:
    """Streams that begin again as soon as they have ended, and what each has got.

    num_tokens: by stream, of all its runs. num_whole: runs that were as they must be. wrong: what others were.
    """

    def __init__(self, llm: AsyncLLM, expected: list[list[int]]) -> None:
        self._llm, self._expected = llm, expected
        self.num_tokens = [0] * NUM_STREAMS
        self.num_whole = 0
        self.wrong: list[str] = []

    async def run(self, stream: int) -> None:
        """One of them, for ever: it goes through the prompts, from one of its own on."""
        for index in itertools.cycle((stream + step) % len(PROMPTS) for step in range(len(PROMPTS))):
            progress = [0]
            task = asyncio.ensure_future(collect(self._llm, index, progress))
            while not task.done():
                before = progress[0]
                await asyncio.wait([task], timeout=0.01)
                self.num_tokens[stream] += progress[0] - before
            if (error := task.exception()) is not None:
                self.wrong.append(f"prompt {index}: {error!r:.300}")
            elif task.result() != self._expected[index]:
                self.wrong.append(f"prompt {index}: {task.result()} and not {self._expected[index]}")
            else:
                self.num_whole += 1

    async def all_go_on(self, num_tokens: int) -> None:
        """Wait until each stream has that many more tokens."""
        goals = [number + num_tokens for number in self.num_tokens]
        while any(number < goal for number, goal in zip(self.num_tokens, goals, strict=True)):
            await asyncio.sleep(0.01)


async def kill_worker(llm: AsyncLLM, rng: random.Random) -> None:
    """Kill the worker, sometimes the next one while it loads, too."""
    for _ in range(rng.choice((1, 1, 2))):
        while (pid := (await status(llm))["worker_pid"]) is None:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        while (await status(llm))["worker_pid"] == pid:
            await asyncio.sleep(0.01)


async def stop_worker(llm: AsyncLLM, rng: random.Random) -> None:
    """Stop the worker for a moment."""
    pid = (await status(llm))["worker_pid"]
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2 * rng.random())
        os.kill(pid, signal.SIGCONT)


async def kill_core(llm: AsyncLLM, rng: random.Random) -> None:
    """Kill the core, and its worker with it."""
    os.kill(llm.session._spawned.pid, signal.SIGKILL)  # type: ignore[union-attr]


async def stop_core(llm: AsyncLLM, rng: random.Random) -> None:
    """Stop the core for a moment."""
    pid = llm.session._spawned.pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2 * rng.random())
    os.kill(pid, signal.SIGCONT)


async def forget(llm: AsyncLLM, rng: random.Random) -> None:
    """Preempt all requests, and forget what is cached."""
    await llm.reset_prefix_cache(reset_running_requests=True)


async def leave(llm: AsyncLLM, rng: random.Random) -> None:
    """Some more streams whose reader leaves midway."""
    tasks = [asyncio.create_task(collect(llm, rng.randrange(len(PROMPTS)), [0])) for _ in range(4)]
    await asyncio.sleep(rng.random())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


FAULTS = (kill_worker, kill_worker, stop_worker, kill_core, stop_core, forget, leave)


async def random_faults(num_faults: int, seed: int) -> bool:
    """Streams undisturbed, then again with one fault after the other, each once all streams have gone on."""
    rng = random.Random(seed)
    async with AsyncLLM.from_engine_args(
        EngineArgs(dtype="float32", kv_cache_memory_bytes=KV_BYTES), restarts=num_faults
    ) as llm:
        expected = await asyncio.gather(*(collect(llm, i, [0]) for i in range(len(PROMPTS))))
        streams = Streams(llm, expected)
        tasks = [asyncio.create_task(streams.run(stream)) for stream in range(NUM_STREAMS)]
        for number in range(num_faults):
            await streams.all_go_on(
                rng.randrange(10, 60)
            )  # more than clears requests that were at many crashes
            fault = rng.choice(FAULTS)
            print(f"fault {number + 1}: {fault.__name__}, after {sum(streams.num_tokens)} tokens", flush=True)
            await fault(llm, rng)
        await streams.all_go_on(100)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while (state := await status(llm))["running"]:
            await asyncio.sleep(0.01)
    print(
        f"{streams.num_whole} streams whole and right, {len(streams.wrong)} wrong",
        *streams.wrong[:5],
        sep="\n  ",
    )
    print(f"free blocks {state['num_free_blocks']} of {state['num_blocks']}")
    return not streams.wrong and state["num_free_blocks"] == state["num_blocks"]


def main() -> int:
    """Run one scenario. Status 1: a token was lost, doubled or changed, or a block was."""
    parser = argparse.ArgumentParser(description="Kill and stop processes, and see that nobody else is hurt.")
    parser.add_argument("scenario", choices=("workers", "frontends", "random"))
    parser.add_argument("--stop-seconds", type=float, default=20.0)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.scenario == "random":
        return 0 if asyncio.run(random_faults(options.faults, options.seed)) else 1
    with running_core("--dtype", "float32") as address:
        if options.scenario == "workers":
            return 0 if asyncio.run(kill_workers(address)) else 1
        return 0 if asyncio.run(disturb_frontends(address, options.stop_seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
