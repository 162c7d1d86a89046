"""What `pagewire inspect` expects of models, beside what then happens.

    python -m benchmarks.inspect_accuracy MODEL [MODEL:dtype=float16 ...] [--json FILE]

Each model is inspected and loaded, one after the other, with options behind colons: `llama:dtype=float32`,
`llama:quantization=int8`. It starts twice, with a cache of its own: from its checkpoint, and from the packed
weights that the first start has kept, where it keeps some. Memory is the worker's resident memory once the whole KV
cache is faulted in. The time is that of a token of one request with little context, the best of several requests:
on a machine that does other work, too, only the best run tells. Prints the processor's name.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.limits import processor
from pagewire.kernels.native.cache import cache_folder

KV_BYTES = 256 << 20
NUM_IN, NUM_OUT = 8, 48
INSPECT_RUNS = 3
DONE_GROWING_SECONDS = 2.0


def main() -> None:
    """Inspect and load each model, and print the figures side by side."""
    parser = argparse.ArgumentParser(description="Measure how accurate `pagewire inspect` is.")
    parser.add_argument("models", nargs="+", metavar="MODEL[:NAME=VALUE...]")
    parser.add_argument("--num-runs", type=int, default=8, help="requests, of which the fastest counts")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    print(processor())
    print(f"{'model':44}{'expected MiB':>14}{'resident':>10}{'':>8}{'expected ms':>14}{'best':>8}{'':>8}")
    rows = []
    for given in options.models:
        model, *settings = given.split(":")
        for row in measure(model, dict(setting.split("=", 1) for setting in settings), options.num_runs):
            rows.append({"model": given, **row})
            print(
                f"{given[-35:]:36}{'kept' if row['is_kept'] else '':8}"
                f"{row['expected_bytes'] / 2**20:14.0f}{row['resident_bytes'] / 2**20:10.0f}"
                f"{row['expected_bytes'] / row['resident_bytes'] - 1:8.1%}"
                f"{1000 * row['expected_s']:14.2f}{1000 * row['token_s']:8.2f}"
                f"{row['expected_s'] / row['token_s'] - 1:8.1%}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"processor": processor(), "models": rows}, indent=1))


def measure(model: str, settings: dict[str, str], num_runs: int) -> Iterator[dict[str, float]]:
    """The figures of the first start of a model, and of the second if the first has kept packed weights."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(cache_folder(), root / "kernels")
        before = os.environ.get("PAGEWIRE_CACHE_ROOT")
        os.environ["PAGEWIRE_CACHE_ROOT"] = folder
        try:
            first = measure_start(model, settings, num_runs)
            yield first
            if list((root / "weights").glob("*.weights")):
                yield measure_start(model, settings, num_runs)
        finally:
            del os.environ["PAGEWIRE_CACHE_ROOT"]
            if before is not None:
                os.environ["PAGEWIRE_CACHE_ROOT"] = before


def measure_start(model: str, settings: dict[str, str], num_runs: int) -> dict[str, float]:
    """The figures of one start: expected, and then found."""
    from pagewire import LLM

    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    before = inspect(model, arguments)
    llm = LLM(model, device="cpu", kv_cache_memory_bytes=KV_BYTES, max_model_len=1024, **settings)
    try:
        token_s = seconds_per_token(llm, num_runs)
        expected = [inspect(model, arguments)["speed"] for _ in range(INSPECT_RUNS)]
        token_s = min(token_s, seconds_per_token(llm, num_runs))
        resident = resident_bytes(llm)
    finally:
        llm.shutdown()
    return {
        "is_kept": before["memory"]["is_kept"],
        "expected_bytes": before["memory"]["resident_bytes"],
        "resident_bytes": resident,
        "expected_s": min(speed["token_seconds"] for speed in expected),
        "read_rate": max(speed["read_rate"] for speed in expected),
        "token_s": token_s,
    }


def inspect(model: str, arguments: list[str]) -> dict[str, Any]:
    """What the command says."""
    command = [sys.executable, "-m", "pagewire.cli.main", "inspect", model, "--json", "--device", "cpu"]
    sizes = ["--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", "1024"]
    done = subprocess.run([*command, *sizes, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def seconds_per_token(llm: Any, num_runs: int) -> float:
    """The least time of a token in several requests, each alone; that of the prompt is left out."""
    from pagewire import SamplingParams

    def seconds(num_out: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": list(range(10, 10 + NUM_IN))}], params, use_tqdm=False)
        return time.perf_counter() - begin

    first = min(seconds(1) for _ in range(num_runs))
    return (min(seconds(NUM_OUT) for _ in range(num_runs)) - first) / (NUM_OUT - 1)


def resident_bytes(llm: Any) -> int:
    """The resident memory of the worker, once it has stopped to fault in its KV cache."""
    process = psutil.Process(llm.llm_engine.session.call("status").result()["worker_pid"])
    size, since = process.memory_info().rss, time.monotonic()
    while time.monotonic() < since + DONE_GROWING_SECONDS:
        time.sleep(0.1)
        if (now := process.memory_info().rss) != size:
            size, since = now, time.monotonic()
    return size


if __name__ == "__main__":
    main()
