"""Random requests and aborts from two frontends for minutes: is every request answered, and memory flat?

    python benchmarks/soak.py --minutes 10

Prints the memory of every process as time goes by; exits 1 if a request hangs, a block leaks, or memory grows
by more than 5 % and 8 MiB between the end of the warm-up (the first fifth) and the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time

import psutil

from benchmarks.daemon import running_core, status
from pagewire import AsyncLLM, RequestOutputKind, SamplingParams

FRONTEND_SECONDS = 120.0  # a request that takes longer hangs


async def one_request(llm: AsyncLLM, rng: random.Random) -> str:
    """A random request, taken to its end or dropped midway; what became of it."""
    prompt = [rng.randrange(10, 4000) for _ in range(rng.choice((1, 5, 40, 300, 700)))]
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 3)),
        temperature=rng.choice((0.0, 0.7, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 20)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        logprobs=rng.choice((None, None, 3)),
        stop=rng.choice((None, None, ["the"])),
        max_tokens=rng.choice((1, 8, 64, 200)),
        output_kind=rng.choice(list(RequestOutputKind)),
    )
    drop_after = rng.randrange(1, 30) if rng.random() < 0.3 else None
    stream = llm.generate(prompt, params)
    count = 0
    finished = False
    async for output in stream:
        count, finished = count + 1, output.finished
        if count == drop_after:
            break
    await stream.aclose()
    return "finished" if finished else "dropped"


async def load(address: str, seconds: float, seed: int) -> None:
    """One frontend: 16 requests at a time until time is up."""
    rng, counts, end = random.Random(seed), {"finished": 0, "dropped": 0}, time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            counts[await asyncio.wait_for(one_request(llm, rng), FRONTEND_SECONDS)] += 1

    async with AsyncLLM.attach(address) as llm:
        await asyncio.gather(*(client() for _ in range(16)))
    print(
        f"frontend {seed}: {counts['finished']} finished, {counts['dropped']} dropped, none unanswered",
        flush=True,
    )


async def watch(address: str, seconds: float, frontends: list[subprocess.Popen[bytes]]) -> bool:
    """Print memory every so often; true if it stayed flat and all blocks came back."""
    async with AsyncLLM.attach(address) as llm:
        worker = psutil.Process((await status(llm))["worker_pid"])
        processes = {"worker": worker, "core": worker.parent()}
        processes |= {f"frontend {i}": psutil.Process(f.pid) for i, f in enumerate(frontends)}
        begin, warm = time.monotonic(), None
        sizes: dict[str, float] = {}
        while all(frontend.poll() is None for frontend in frontends):
            minutes = (time.monotonic() - begin) / 60
            sizes = {name: process.memory_info().rss / 2**20 for name, process in processes.items()}
            text = ", ".join(f"{name} {size:.0f}" for name, size in sizes.items())
            print(f"{minutes:5.1f} min  MiB: {text}", flush=True)
            if warm is None and minutes * 60 > seconds / 5:
                warm = sizes
            await asyncio.sleep(min(30.0, seconds / 12))
        codes = [frontend.wait() for frontend in frontends]
        while (state := await status(llm))["running"]:
            await asyncio.sleep(0.01)
    grown = {name: sizes[name] - size for name, size in (warm or sizes).items()}
    flat = all(more < max(8.0, 0.05 * sizes[name]) for name, more in grown.items())
    print("grown since warm-up, MiB: " + ", ".join(f"{name} {more:+.1f}" for name, more in grown.items()))
    print(f"free blocks {state['num_free_blocks']} of {state['num_blocks']}; frontends' exit {codes}")
    return flat and codes == [0, 0] and state["num_free_blocks"] == state["num_blocks"]


def main() -> int:
    """Run the soak, or one of its frontends."""
    parser = argparse.ArgumentParser(description="Soak test of a core with two frontends.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--frontend", nargs=2, metavar=("ADDRESS", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = options.minutes * 60
    if options.frontend:
        asyncio.run(load(options.frontend[0], seconds, int(options.frontend[1])))
        return 0
    with running_core("--dtype", "float32") as address:
        command = [
            sys.executable,
            "-m",
            "benchmarks.soak",
            "--minutes",
            str(options.minutes),
            "--frontend",
            address,
        ]
        frontends = [subprocess.Popen([*command, str(seed)]) for seed in range(2)]
        return 0 if asyncio.run(watch(address, seconds, frontends)) else 1


if __name__ == "__main__":
    sys.exit(main())
