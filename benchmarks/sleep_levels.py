"""What sleep gives back, and what a wake takes: the memory of each process at each level, and seconds.

    python -m benchmarks.sleep_levels MODEL [MODEL ...] [--runs 3]

The engine has generated some tokens first, so that it is as large as one in use. Memory is private to a process
(USS) and resident (RSS, with the files of libraries, which processes share), in MiB. A wake is timed until the call
returns, and until a request that has waited for it has its 32 tokens. Seconds are medians. Tokens after each wake
are checked against those before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from pagewire import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(5, 300))}
KINDS: dict[str, dict[str, object]] = {
    "level 1, kv_cache": {"level": 1, "tags": ["kv_cache"]},
    "level 1": {"level": 1},
    "level 2": {"level": 2},
}


def processes() -> Iterator[tuple[str, psutil.Process]]:
    """The processes of the engine by name: frontend, core, worker, and those beside."""
    own = psutil.Process()
    yield "frontend", own
    for process in own.children(recursive=True):
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        line = " ".join(process.cmdline())
        parts = {"core": "engine_core", "worker": "workers.process.main"}
        yield next((name for name, module in parts.items() if module in line), "other"), process


def memory() -> dict[str, tuple[float, float]]:
    """MiB of each kind of process, private and resident."""
    sums: dict[str, tuple[float, float]] = {}
    for name, process in processes():
        info = process.memory_full_info()
        uss, rss = sums.get(name, (0.0, 0.0))
        sums[name] = uss + info.uss / 2**20, rss + info.rss / 2**20
    return sums


def tokens(llm: LLM) -> list[int]:
    """What the model makes of the prompt."""
    return list(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def wake(llm: LLM, expected: list[int]) -> tuple[float, float]:
    """Seconds until the engine is awake, and until a request that waits for it has all of its tokens."""
    ended: list[float] = []

    def wait() -> None:
        if tokens(llm) != expected:
            sys.exit("tokens after a wake are not those before")
        ended.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not llm.llm_engine.session.call("status").result()["waiting"]:
        time.sleep(0.01)
    began = time.perf_counter()
    llm.wake_up()
    awake = time.perf_counter() - began
    waiting.join()
    return awake, ended[0] - began


def measure(model: str, num_runs: int) -> None:
    """Measure a model, and print a line for each level."""
    llm = LLM(model, skip_tokenizer_init=not (Path(model) / "tokenizer.json").exists() and model != "demo")
    expected = tokens(llm)
    llm.sleep(1)  # waits until packed weights are kept, from which wakes read them
    llm.wake_up()
    tokens(llm)
    show(f"{model}: awake", memory())
    for kind, arguments in KINDS.items():
        seconds = []
        for _ in range(num_runs):
            began = time.perf_counter()
            llm.sleep(**arguments)  # type: ignore[arg-type]
            asleep = time.perf_counter() - began
            while llm.llm_engine.session.call("status").result()["worker_pid"] and arguments["level"] == 2:
                time.sleep(0.01)
            held = memory()
            seconds.append((asleep, *wake(llm, expected)))
        show(f"{model}: {kind}", held)
        fell, woke, answered = (statistics.median(column) for column in zip(*seconds, strict=True))
        print(f"    asleep after {fell:.2f} s, awake after {woke:.2f} s, 32 tokens after {answered:.2f} s")
    llm.shutdown()


def show(title: str, held: dict[str, tuple[float, float]]) -> None:
    """Print the memory of each kind of process."""
    parts = (f"{name} {uss:.0f} ({rss:.0f})" for name, (uss, rss) in held.items())
    print(f"{title}: MiB private (resident):", ", ".join(parts), flush=True)


def main() -> None:
    """Measure each model in turn."""
    parser = argparse.ArgumentParser(description="Measure what sleep gives back and what a wake takes.")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    for model in options.models:
        measure(model, options.runs)


if __name__ == "__main__":
    main()
