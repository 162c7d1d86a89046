"""Ours and other engines on the same works, in turn, beside what the machine can do at most.

    python -m benchmarks.compare llama-300m MODEL_FOLDER \\
        --peer vllm=/path/to/its/python --peer openvino=/path/to/its/python,EXPORTED_MODEL_FOLDER

`--peer pagewire:before=/path/to/python` is an older version of ours, installed in an environment of its own, with
the same options; `--peer 'pagewire:bf16=/path/to/python,MODEL_FOLDER'` one without them. With quantised weights:

    LLAMA_BATCHED_BENCH=/path/to/it python -m benchmarks.compare quantised MODEL_FOLDER \\
        --options '{"quantization": "int8"}' --bits 8.5 --peer llama_cpp=python,MODEL.gguf
    LLAMA_BATCHED_BENCH=/path/to/it python -m benchmarks.compare gguf MODEL.gguf --bits 4.5 \\
        --peer llama_cpp=python,MODEL.gguf

Of families, each model in a folder of `benchmarks.make_families` is measured in turn with the Llama in it:

    python -m benchmarks.compare families FOLDER

Every engine runs in a process of its own, started once and stopped while it is not its turn; each work is done
`--runs` times by each, in turn, with prompts that no engine has seen. The table gives medians, their spread, ours
over theirs, and how near our runs came to what the machine gave just before each. Everything goes to
`benchmarks/results/` as JSON too.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors import safe_open

from benchmarks.limits import Limits, floor_seconds, measure_limits, processor

ENGINES = Path(__file__).parent / "engines"
RESULTS = Path(__file__).parent / "results"
QUIET_CPU_S = 0.1
"""Processor time of an engine within a second that does not disturb another one."""
SEEDS = 10**6
"""Of prompts that one comparison draws, at most."""
SHORT_S, SHORT_RUNS = 0.2, 5
"""A work that takes less than `SHORT_S` seconds runs `SHORT_RUNS` times, and the median is used."""


@dataclass(frozen=True)
class Work:
    """`count` requests of `input` random tokens (the first `shared` the same in all), `output` new ones each.

    what: seconds counts all of it; ttft: a single new token; tpot: each token after the first.
    """

    what: str
    count: int
    input: int
    output: int
    shared: int = 0

    @property
    def label(self) -> str:
        """For the table."""
        shared = f" ({self.shared} shared)" if self.shared else ""
        return f"{self.count} x {self.input}/{self.output}{shared} {self.what}"


WORKS = {
    "llama-300m": (
        Work("out/s", 32, 128, 128),
        Work("out/s", 8, 1024, 128),
        Work("out/s", 64, 32, 256),
        Work("tpot", 1, 128, 128),
        Work("ttft", 1, 3500, 64),
        Work("out/s", 64, 1020, 64, shared=1000),
    ),
    "llama-mini": (Work("out/s", 256, 32, 128), Work("tpot", 1, 32, 128)),
    "llama-1b": (Work("out/s", 16, 128, 64),),
    "families": (Work("tpot", 1, 128, 128), Work("out/s", 32, 128, 128), Work("ttft", 1, 2048, 1)),
    "quantised": (Work("tpot", 1, 128, 128), Work("out/s", 32, 128, 128), Work("ttft", 1, 512, 1)),
    "gguf": (
        Work("tpot", 1, 128, 128),
        Work("out/s", 8, 128, 128),
        Work("out/s", 32, 128, 128),
        Work("ttft", 1, 512, 1),
        Work("ttft", 1, 4000, 1),
    ),
}


class Engine:
    """A driver of `benchmarks/engines` in its own interpreter."""

    def __init__(self, name: str, python: str, model: str, options: str | None = None) -> None:
        self.name = name
        self.driver, _, _ = name.partition(":")
        script = ENGINES / f"run_{self.driver}.py"
        self.process = subprocess.Popen(
            [python, str(script), model, *([options] if options else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ENGINES,  # not here, where the version of this folder would be imported
        )
        self.start_s = self._answer()["start_s"]
        self._signal(signal.SIGSTOP)

    def run(self, **work: int) -> dict[str, float]:
        """Do a work; its figures."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        found = self._answer()
        self._signal(signal.SIGSTOP)
        return found

    def _signal(self, number: signal.Signals) -> None:
        """Threads of others go on looking for work when there is none. Ours sleep, and send heartbeats."""
        if self.driver != "pagewire":
            root = psutil.Process(self.process.pid)
            for process in (root, *root.children(recursive=True)):
                process.send_signal(number)

    def wait_until_quiet(self) -> None:
        """Wait for what is done in idle moments after a start: ours has the system make its KV cache's pages."""
        spent, before = self._cpu_seconds(), -1.0
        while spent - before > QUIET_CPU_S:
            time.sleep(1.0)
            spent, before = self._cpu_seconds(), spent

    def _cpu_seconds(self) -> float:
        root = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return sum(spent.user + spent.system for spent in times)

    def peak_rss_bytes(self) -> int:
        """Largest resident sizes of its processes, added up; shared pages count in each."""
        root = psutil.Process(self.process.pid)
        total = 0
        for process in (root, *root.children(recursive=True)):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
        return total

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                found: dict[str, float] = json.loads(line[1:])
                return found
        raise RuntimeError(f"{self.name} ended (status {self.process.wait()}); its messages above tell why")


@dataclass
class Measured:
    """One engine's runs of one work: values in out/s, or in seconds."""

    values: list[float] = field(default_factory=list)
    idle_shares: list[float] = field(default_factory=list)
    floor_shares: list[float] = field(default_factory=list)
    """Ours only: how near each run came to what the machine allowed just before it."""

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """From the least to the greatest, relative to the median."""
        return (max(self.values) - min(self.values)) / self.median


def measure(engine: Engine, work: Work, seed: int) -> tuple[float, float | None]:
    """One run: the value, and the share of time that the worker was idle (where the driver tells)."""
    first = 0.0
    if work.what != "out/s":
        first = timed(engine, work, 1, 2 * seed)["seconds"]
        if work.what == "ttft":
            return first, None
    found = timed(engine, work, work.output, 2 * seed + 1)
    idle = None
    if "worker_busy_s" in found:
        idle = found["worker_idle_s"] / (found["worker_busy_s"] + found["worker_idle_s"])
    if work.what == "tpot":
        return (found["seconds"] - first) / (work.output - 1), idle
    return work.count * work.output / found["seconds"], idle


def timed(engine: Engine, work: Work, output: int, seed: int) -> dict[str, float]:
    """Run a work with `output` tokens for each request. Short works run several times; returns the median run."""
    asked = {"count": work.count, "input": work.input, "shared": work.shared, "output": output}
    runs = [engine.run(**asked, seed=seed)]
    while runs[0]["seconds"] < SHORT_S and len(runs) < SHORT_RUNS:
        runs.append(engine.run(**asked, seed=seed + 10**9 * len(runs)))
    return sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]


def compare(
    engines: list[Engine],
    works: tuple[Work, ...],
    runs: int,
    floor_now: Callable[[Work], float],
    first_seed: int = 0,
) -> dict[Work, dict[str, Measured]]:
    """All works by all engines, in turn.

    floor_now: the best value of a work that the machine allows now. first_seed: of the prompts; with another one, a
    multiple of `SEEDS`, an engine that has run before gets prompts that it has not seen.
    """
    for engine in engines:
        engine.wait_until_quiet()
    results: dict[Work, dict[str, Measured]] = {}
    for number, work in enumerate(works):
        results[work] = {engine.name: Measured() for engine in engines}
        for engine in engines:  # whatever happens at a first time only
            engine.run(
                count=min(work.count, 4),
                input=work.input,
                shared=0,
                output=4,
                seed=first_seed + 10**5 + number,
            )
        for run in range(runs):
            for engine in engines[run % len(engines) :] + engines[: run % len(engines)]:
                measured = results[work][engine.name]
                floor = floor_now(work) if engine is engines[0] else None
                value, idle = measure(engine, work, first_seed + 1000 * number + run)
                measured.values.append(value)
                if idle is not None:
                    measured.idle_shares.append(idle)
                if floor is not None:
                    measured.floor_shares.append(speed_ratio(work, value, floor))
                print(f"{work.label}  {engine.name}  {shown(work, value)}", file=sys.stderr, flush=True)
    return results


def shown(work: Work, value: float) -> str:
    """A value with its unit."""
    return f"{value:,.0f} out/s" if work.what == "out/s" else f"{1e3 * value:,.2f} ms"


def speed_ratio(work: Work, ours: float, theirs: float) -> float:
    """How much faster ours is."""
    return ours / theirs if work.what == "out/s" else theirs / ours


def floor_of(work: Work, limits: Limits, model: Path, bits: float) -> float:
    """The best value that such limits allow with weights of `bits`."""
    prefill = floor_seconds(limits, model, work.count, work.input, 1, work.shared, bits)
    if work.what == "ttft":
        return prefill
    whole = floor_seconds(limits, model, work.count, work.input, work.output, work.shared, bits)
    if work.what == "tpot":
        return (whole - prefill) / (work.output - 1)
    return work.count * work.output / whole


def table(results: dict[Work, dict[str, Measured]]) -> str:
    """Markdown."""
    names = list(next(iter(results.values())))
    rows = [["work", *names, *(f"over {name}" for name in names[1:]), "of the floor", "worker idle"]]
    for work, by_engine in results.items():
        ours = by_engine[names[0]]
        cells = [f"{shown(work, m.median)} ±{50 * m.spread:.0f}%" for m in by_engine.values()]
        ratios = [f"{speed_ratio(work, ours.median, by_engine[name].median):.2f}" for name in names[1:]]
        share = statistics.median(ours.floor_shares)
        idle = f"{100 * statistics.median(ours.idle_shares):.1f}%" if ours.idle_shares else ""
        rows.append([work.label, *cells, *ratios, f"{100 * share:.0f}%", idle])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def num_read_weights(folder: Path) -> int:
    """Weights of a checkpoint that a token reads: all in matrices, of experts those that a token gets."""
    config, total = json.loads((folder / "config.json").read_text()), 0
    chosen = config.get("num_experts_per_tok", 1) / config.get("num_local_experts", 1)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                shape = file.get_slice(name).get_shape()
                total += (
                    round(math.prod(shape) * (chosen if ".experts." in name else 1)) if len(shape) > 1 else 0
                )
    return total


def compare_families(folder: Path, works: tuple[Work, ...], runs: int, options: dict[str, Any]) -> None:
    """Measure each model in a folder in turn with the Llama there; print the table and write the JSON.

    A family's time for an operation, relative to Llama's, is its time over the weights that a token reads.
    """
    more = json.dumps({"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 30, **options})
    llama, read = (
        Engine("pagewire", sys.executable, str(folder / "llama"), more),
        num_read_weights(folder / "llama"),
    )
    rows = [["family", *(f"{work.label}, Llama's" for work in works), "weights", "start, s"]]
    rows.append(["---"] * len(rows[0]))
    written: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": processor(), "options": options}
    for number, own in enumerate(sorted(path for path in folder.iterdir() if path.name != "llama")):
        engine = Engine(f"pagewire:{own.name}", sys.executable, str(own), more)
        found = compare([engine, llama], works, runs, lambda work: math.nan, number * SEEDS)
        engine.close()
        size = num_read_weights(own) / read
        cells = []
        for work, by_engine in found.items():
            ours, theirs = by_engine[engine.name].median, by_engine["pagewire"].median
            ratio = 1 / speed_ratio(work, ours, theirs) / size
            cells.append(f"{shown(work, ours)}, {shown(work, theirs)} (**{ratio:.2f}** an operation)")
        rows.append([own.name, *cells, f"{size:.2f}", f"{engine.start_s:.1f}"])
        written[own.name] = {
            "weights": size,
            "start_s": engine.start_s,
            "works": {work.label: {name: m.values for name, m in row.items()} for work, row in found.items()},
        }
    llama.close()
    print(processor())
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    named = "-".join(["compare-families", *re.findall(r"\w+", json.dumps(options)), written["date"]])
    (RESULTS / f"{named}.json").write_text(json.dumps(written, indent=1) + "\n")


def main() -> None:
    """Start the engines, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Compare pagewire with other engines.")
    parser.add_argument("works", choices=WORKS, help="which set of works")
    parser.add_argument("model", type=Path, help="a model folder, or a GGUF file")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON[,MODEL]",
        help="vllm, openvino, transformers, llama_cpp, or pagewire:LABEL for another version of ours",
    )
    parser.add_argument("--options", help="more options of our engine, as JSON")
    parser.add_argument("--bits", type=float, default=16, help="of a weight of ours, for the floor")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="works whose label contains this")
    options = parser.parse_args()
    options.model = options.model.resolve()
    works = tuple(work for work in WORKS[options.works] if (options.only or "") in work.label)
    if options.works == "families":
        compare_families(options.model, works, options.runs, json.loads(options.options or "{}"))
        return
    engines = [Engine("pagewire", sys.executable, str(options.model), options.options)]
    for peer in options.peer:
        name, _, rest = peer.partition("=")
        python, _, model = rest.partition(",")
        is_older_version = name.startswith("pagewire") and not model
        own_options = options.options if is_older_version else None
        engines.append(Engine(name, python, model or str(options.model), own_options))

    def floor_now(work: Work) -> float:
        """Measured anew each time: neighbours on a shared machine take of its memory's bandwidth what they need."""
        return floor_of(work, measure_limits(statistics.median), options.model, options.bits)

    results = compare(engines, works, options.runs, floor_now)
    peaks = {engine.name: engine.peak_rss_bytes() for engine in engines}
    for engine in engines:
        engine.close()
    print(processor())
    print(table(results))
    print("start to ready: " + ", ".join(f"{engine.name} {engine.start_s:.1f} s" for engine in engines))
    print("peak RSS: " + ", ".join(f"{name} {peak / 2**20:,.0f} MiB" for name, peak in peaks.items()))
    written: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": processor(),
        "options": options.options,
        "start_s": {engine.name: engine.start_s for engine in engines},
        "peak_rss_bytes": peaks,
        "works": {work.label: {name: m.values for name, m in row.items()} for work, row in results.items()},
        "floor_shares": {work.label: row[engines[0].name].floor_shares for work, row in results.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    name = "-".join(["compare", options.works, *re.findall(r"\w+", options.options or ""), written["date"]])
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
