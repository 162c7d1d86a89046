"""What happens to others when a process is killed or stopped: prints figures, exits 1 if a token is wrong.

    python -m benchmarks.faults workers      # 64 requests, the worker killed three times
    python -m benchmarks.faults frontends    # three frontends at once: one killed, one stopped for a while

Starts a core of its own on the demo model in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time

from benchmarks.daemon import running_core, status
from pagewire import LLM, AsyncLLM, RequestOutputKind, SamplingParams

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


def main() -> int:
    """Run one scenario. Status 1: a token was lost, doubled or changed, or a block was."""
    parser = argparse.ArgumentParser(description="Kill and stop processes, and see that nobody else is hurt.")
    parser.add_argument("scenario", choices=("workers", "frontends"))
    parser.add_argument("--stop-seconds", type=float, default=20.0)
    options = parser.parse_args()
    with running_core("--dtype", "float32") as address:
        if options.scenario == "workers":
            return 0 if asyncio.run(kill_workers(address)) else 1
        return 0 if asyncio.run(disturb_frontends(address, options.stop_seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
