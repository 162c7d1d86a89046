"""How long an engine takes to start: first start, next starts from packed weights, and a worker that is restarted.

    python -m benchmarks.start MODEL [--quantization int4] [--runs 3]

Each start is an `LLM` of its own in a new interpreter, timed from before its first import, with a cache of its own.
A first start quantises, packs and proves the weights, and keeps them; one without a cache keeps nothing.
For a restart the worker is killed while it generates; the time is that until the next token. Processor seconds are
those of the worker at that moment, all its threads together: where others use the machine, they tell more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from pagewire.kernels.native.cache import cache_folder

PROGRAM = """
import time; begin = time.perf_counter()
import json, os, signal, sys
import psutil
from pagewire import LLM, RequestOutputKind, SamplingParams

def worker():
    found = [p for p in psutil.Process().children(recursive=True) if "pagewire.workers.process.main" in p.cmdline()]
    return found[0]

def processor_seconds():
    times = worker().cpu_times()
    return times.user + times.system

quantization = sys.argv[4] or None
llm = LLM(sys.argv[1], device="cpu", weight_cache=sys.argv[2] == "cache", quantization=quantization)
report = {"ready_s": time.perf_counter() - begin, "worker_cpu_s": processor_seconds()}
greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
llm.generate("The", greedy, use_tqdm=False)
report["first_token_s"] = time.perf_counter() - begin
if sys.argv[3] == "kill":
    killed = time.perf_counter()
    os.kill(worker().pid, signal.SIGKILL)
    llm.generate("The", greedy, use_tqdm=False)
    report["restart_s"] = time.perf_counter() - killed
    report["restart_cpu_s"] = processor_seconds()
print(json.dumps(report), flush=True)
sys.stdin.readline()  # the engine lives until its weights are kept
llm.shutdown()
"""


def start(
    model: str, quantization: str, root: Path, *, cache: bool, kill: bool = False, kept: int = 0
) -> dict[str, float]:
    """One start of an engine; afterwards `kept` files of packed weights must be there."""
    env = os.environ | {"PAGEWIRE_CACHE_ROOT": str(root), "PAGEWIRE_LOGGING_LEVEL": "WARNING"}
    arguments = [model, "cache" if cache else "none", "kill" if kill else "live", quantization]
    engine = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    report: dict[str, float] = json.loads(engine.stdout.readline())
    while len(list((root / "weights").glob("*.weights"))) < kept:
        time.sleep(0.1)
    engine.communicate("\n")
    return report


def measure(model: str, quantization: str, num_runs: int) -> dict[str, Any]:
    """The medians of all kinds of starts. quantization: of a checkpoint of plain numbers; empty: none."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(cache_folder(), root / "kernels")
        kinds = {
            "first": partial(start, cache=True, kept=1),
            "without a cache": partial(start, cache=False, kill=True),
            "second": partial(start, cache=True, kill=True),
        }
        runs: dict[str, list[dict[str, float]]] = {}
        for _ in range(num_runs):
            shutil.rmtree(root / "weights", ignore_errors=True)
            for name, start_it in kinds.items():
                runs.setdefault(name, []).append(start_it(model, quantization, root))
    return {
        name: {figure: round(statistics.median(run[figure] for run in each), 2) for figure in each[0]}
        for name, each in runs.items()
    }


def main() -> None:
    """Measure, and print a line for each kind of start."""
    parser = argparse.ArgumentParser(description="Measure the start of an engine.")
    parser.add_argument("model")
    parser.add_argument(
        "--quantization", default="", help="quantise plain numbers so, for example int8 or int4"
    )
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    for name, figures in measure(options.model, options.quantization, options.runs).items():
        print(f"{name:16}", *(f"{figure} {value:.2f}" for figure, value in figures.items()), sep="  ")


if __name__ == "__main__":
    main()
