"""Gaps between the tokens of streams while a long prompt is computed beside them.

    python -m benchmarks.gaps MODEL                                         # default options, and without a limit
    python -m benchmarks.gaps MODEL --options '{"max_step_ms": 100}' --options '{"max_step_ms": 0}'

MODEL is a folder, such as the Llama of 300M that `benchmarks.make_families` makes; `--make` makes one for long
prompts there first. For each set of options there is an engine, and all take turns: in each run an engine computes
one prompt alone, and one beside streams. Prompts are random, so that none finds another's blocks. Figures are the
medians of the runs, and the largest gap of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.limits import processor
from benchmarks.make_families import COMMON, make
from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams

MAX_MODEL_LEN = 32_768
STREAM_PROMPT = 16
WARM_TOKENS = 8  # of each stream before the prompt comes
TOKEN_IDS = range(10, 30_000)


@dataclass
class Beside:
    """What one run has measured: gaps of the streams, and when the prompt had its first token, in seconds."""

    gaps: list[float] = field(default_factory=list)
    first_token: float = 0.0


@dataclass
class Figures:
    """All runs of one engine with prompts of one length. alone: first tokens without streams."""

    runs: list[Beside] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)

    def line(self) -> str:
        """The figures in words."""
        gaps = sorted(gap for run in self.runs for gap in run.gaps)
        largest = [max(run.gaps) for run in self.runs]
        p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
        first = [run.first_token for run in self.runs]
        return (
            f"gaps: median {statistics.median(gaps):6.3f}, p99 {p99:6.3f}, "
            f"largest {max(largest):6.3f} (median of runs {statistics.median(largest):6.3f}); "
            f"first token {statistics.median(first):7.2f} ({min(first):.2f} to {max(first):.2f}), "
            f"alone {statistics.median(self.alone):7.2f}"
        )


async def measure(engine: AsyncLLM, name: str, length: int, num_streams: int, seed: int) -> Beside:
    """One run: streams, and a prompt of `length` tokens once each of them has some tokens."""
    rng, found, warm = random.Random(seed), Beside(), asyncio.Semaphore(0)
    begin, end = 0.0, asyncio.Event()

    async def stream(number: int) -> None:
        last, seen = 0.0, 0
        prompt: Any = {"prompt_token_ids": rng.choices(TOKEN_IDS, k=STREAM_PROMPT)}
        async with aclosing(engine.generate(prompt, until(10_000), f"{name}-{number}")) as outputs:
            async for output in outputs:
                now, seen = time.monotonic(), seen + len(output.outputs[0].token_ids)
                if begin:
                    found.gaps.append(now - max(last, begin))
                elif seen >= WARM_TOKENS:
                    warm.release()
                last = now
                if end.is_set():
                    return

    tasks = [asyncio.ensure_future(stream(number)) for number in range(num_streams)]
    for _ in tasks:
        await warm.acquire()
    begin = time.monotonic()
    found.first_token = await first_token(engine, f"{name}-prompt", length, rng)
    end.set()
    await asyncio.gather(*tasks)
    return found


async def first_token(engine: AsyncLLM, name: str, length: int, rng: random.Random) -> float:
    """The seconds to the first token of a random prompt."""
    begin = time.monotonic()
    prompt: Any = {"prompt_token_ids": rng.choices(TOKEN_IDS, k=length)}
    async for _ in engine.generate(prompt, until(1), name):
        pass
    return time.monotonic() - begin


def until(max_tokens: int) -> SamplingParams:
    """Parameters of a request for this number of tokens, which are streamed one by one."""
    kind = RequestOutputKind.DELTA
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=kind)


async def compare(engines: dict[str, AsyncLLM], options: argparse.Namespace) -> None:
    """Run all engines in turn, and print what was measured."""
    for length in options.prompts:
        figures = {name: Figures() for name in engines}
        for run in range(options.runs):
            for name, engine in engines.items():
                own = figures[name]
                own.runs.append(await measure(engine, f"{length}-{run}", length, options.streams, run))
                rng = random.Random(1_000 + run)
                own.alone.append(await first_token(engine, f"{length}-{run}-alone", length, rng))
        print(f"prompt of {length} tokens, {options.streams} streams, {options.runs} runs in turn (seconds)")
        for name, own in figures.items():
            print(f"  {name:32} {own.line()}", flush=True)


def main() -> None:
    """Measure for the given options."""
    parser = argparse.ArgumentParser(description="Gaps of streams beside long prompts.")
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument(
        "--make", action="store_true", help="write a Llama of 300M of random weights there first"
    )
    parser.add_argument("--options", type=json.loads, action="append", help="JSON of an engine's options")
    parser.add_argument("--prompts", type=int, nargs="+", default=[500, 3_500, 30_000])
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if options.make:
        COMMON["max_position_embeddings"] = MAX_MODEL_LEN
        make("llama", options.model)
    print(processor(), flush=True)
    engines = {}
    for given in options.options or [{}, {"max_step_ms": 0}]:
        args = {"max_model_len": MAX_MODEL_LEN, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 30}
        engines[json.dumps(given)] = AsyncLLM.from_engine_args(
            EngineArgs.from_kwargs({"model": str(options.model), **args, **given})
        )
    try:
        asyncio.run(compare(engines, options))
    finally:
        for engine in engines.values():
            engine.shutdown()


if __name__ == "__main__":
    main()
