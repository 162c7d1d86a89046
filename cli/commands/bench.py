"""`pagewire bench`: throughput of many requests, latency of one request, load on a server (`bench_serve.py`).

`throughput` and `latency` print a line of a table per run; with --json, an object. With options of speculation they
measure twice, first without them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.commands import SUMMARIES, bench_serve
from pagewire.cli.console.options import (
    add_attach_options,
    add_engine_options,
    engine_args,
    positive,
)
from pagewire.cli.console.parser import UsageError

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM

DESCRIPTION = (
    "Prompts are random tokens unless --dataset-path is given; sampling is greedy and does not stop at the end of "
    "sequence."
)
COLUMNS = {
    "seconds": "seconds",
    "output_tokens_per_s": "tokens/s",
    "ttft_ms": "first token, ms",
    "tpot_ms": "later token, ms",
}
"""The figures of a run, and the heads of their columns."""
WIDTH = 17  # of a column
WARM_UP_TOKENS = 8  # output length of the warm-up requests, which only have to compile and allocate
LOWEST_ID = 10  # lower ids are special tokens in most vocabularies


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    parser = commands.add_parser(
        "bench",
        help=SUMMARIES["bench"],
        description="Measure an engine, or a server.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, text, count in (
        ("latency", "one request: time to first token, time per token", 1),
        ("throughput", "many requests at once: tokens per second", 32),
    ):
        kind = kinds.add_parser(name, help=text, description=f"Measure {text}. {DESCRIPTION}")
        for flag, default, meaning in (
            ("--num-prompts", count, "requests at once"),
            ("--input-len", 128, "tokens per prompt"),
            ("--output-len", 128, "tokens to generate"),
            ("--num-runs", 3, "measured runs, after a warm-up"),
        ):
            more = ("--num-iters",) if flag == "--num-runs" else ()  # vLLM's name
            kind.add_argument(
                flag,
                *more,
                type=positive,
                default=default,
                metavar="INT",
                help=f"{meaning} (default: {default})",
            )
        kind.add_argument(
            "--dataset-path",
            "--dataset",
            type=Path,
            metavar="FILE",
            help="take prompts and output lengths from conversations in ShareGPT's format",
        )
        kind.add_argument("--json", action="store_true", help="print each run as a JSON object, on a line")
        add_attach_options(kind)
        add_engine_options(kind)
        kind.set_defaults(run=run)
    bench_serve.register(kinds)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the figures of each run and their medians."""
    if options.attach or engine_args(options).resolved_speculation() is None:
        median = medians(options)
        print(json.dumps({"median": median}) if options.json else row("median", median))
        return 0
    say(options, "without speculation:")
    off = medians(without_speculation(options))
    say(options, row("median", off), "", "with speculation:")
    on = medians(options)
    gain = round(off["tpot_ms"] / on["tpot_ms"], 3) if on["tpot_ms"] else None
    say(options, row("median", on), "", f"speculation: {gain or 1:g} times the speed")
    if options.json:
        print(json.dumps({"median": on, "median_without_speculation": off, "speculation_gain": gain}))
    return 0


def say(options: argparse.Namespace, *lines: str) -> None:
    """Print lines for people, unless the output is JSON."""
    if not options.json:
        print("\n".join(lines), flush=True)


def row(name: str, figures: Mapping[str, Any]) -> str:
    """A line of the table: of a run, by its name, with its figures."""
    cells = (figures.get(column, "") for column in COLUMNS)
    return f"{name:<8}" + "".join(
        f"{cell if isinstance(cell, str) else f'{cell:,.2f}':>{WIDTH}}" for cell in cells
    )


def without_speculation(options: argparse.Namespace) -> argparse.Namespace:
    """The same options, with nothing that proposes tokens."""
    from pagewire.ipc.speculative import FLAGS

    return argparse.Namespace(**vars(options) | dict.fromkeys(FLAGS) | {"speculative_config": {}})


def medians(options: argparse.Namespace) -> dict[str, float]:
    """Open an engine, warm up, measure, and return the median of each figure."""
    from pagewire.cli.console.engine import opened
    from pagewire.frontend.api import async_llm

    begin = time.perf_counter()
    with opened(options) as engine:
        if not options.dataset_path and options.input_len + options.output_len > engine.info.max_model_len:
            raise UsageError(f"--input-len and --output-len exceed max_model_len={engine.info.max_model_len}")
        seconds = round(time.perf_counter() - begin, 3)
        print(json.dumps({"start_s": seconds}) if options.json else f"started in {seconds:.1f} s", flush=True)
        runs = async_llm.run(measure(engine, options))
    return {name: statistics.median(figures[name] for figures in runs) for name in runs[0]}


async def measure(engine: AsyncLLM, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the figures of each run, by name (see `batch`)."""
    rng = random.Random(0)
    warm = await requests(engine, rng, options, 2)
    await batch(engine, [(prompt, min(WARM_UP_TOKENS, num_out)) for prompt, num_out in warm])
    runs: list[dict[str, float]] = []
    say(options, row("run", COLUMNS))
    for number in range(1, options.num_runs + 1):
        runs.append(await batch(engine, await requests(engine, rng, options, options.num_prompts)))
        print(json.dumps(runs[-1]) if options.json else row(str(number), runs[-1]), flush=True)
    return runs


async def requests(
    engine: AsyncLLM, rng: random.Random, options: argparse.Namespace, count: int
) -> list[tuple[list[int], int]]:
    """Return `count` prompts, each with the number of tokens to generate.

    Raises:
        UsageError: the file of conversations cannot be used.
    """
    if options.dataset_path is None:
        ids = range(LOWEST_ID, engine.info.vocab_size)
        return [(rng.choices(ids, k=options.input_len), options.output_len) for _ in range(count)]
    from pagewire.cli.load.sharegpt import conversations

    tokenizer = await engine.get_tokenizer()
    if tokenizer is None:
        raise UsageError("--dataset-path needs a tokenizer: leave out --skip-tokenizer-init")

    async def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text)
        return ids

    seed, limit = rng.randrange(1 << 32), engine.info.max_model_len
    chosen = await conversations(options.dataset_path, count, seed, encode, limit)
    return [(ids, num_out) for _, ids, num_out in chosen]


async def batch(engine: AsyncLLM, asked: list[tuple[list[int], int]]) -> dict[str, float]:
    """Send prompts at once, wait for all, and return the figures of the run.

    asked: token ids, and how many to generate. ttft_ms, tpot_ms: medians over the requests of the time to the
    first token and the time per later token.
    """
    import asyncio

    from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams

    async def request_times(prompt: list[int], num_out: int) -> tuple[float, float]:
        """Return the seconds to the first token of one request, and per later token."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_out,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        begin, first = time.perf_counter(), 0.0
        async for _ in engine.generate(prompt, params):
            first = first or time.perf_counter() - begin
        return first, (time.perf_counter() - begin - first) / max(1, num_out - 1)

    begin = time.perf_counter()
    times = await asyncio.gather(*(request_times(prompt, num_out) for prompt, num_out in asked))
    seconds = time.perf_counter() - begin
    return {
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(sum(num_out for _, num_out in asked) / seconds, 2),
        "ttft_ms": round(1e3 * statistics.median(first for first, _ in times), 3),
        "tpot_ms": round(1e3 * statistics.median(later for _, later in times), 3),
    }
