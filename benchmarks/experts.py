"""A model with experts beside an older version of ours, for one request and for 32, dense and quantised.

    python -m benchmarks.experts MODEL --before PYTHON [--quantization none int8 int4] [--chosen 2 4]

MODEL is a folder of `benchmarks.make_moe`, PYTHON that of an environment with the older version. Two workers
without a core take a few steps in turn, so that whatever else the machine does slows both; the fastest steps count.
The floor of one request is the time in which the weights of a token are read, at the rate measured beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTH, NEW, MANY = 128, 128, 32  # tokens of a prompt and of its output, and requests of a batch
STEPS = {1: 8, MANY: 2}  # in a turn
MIDDLE = LENGTH + NEW // 2  # tokens in the cache of a request in the middle of its output


class Worker:
    """A runner whose requests decode tokens."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from pagewire.engine_core.config.config import EngineConfig
        from pagewire.ipc.options.engine_args import EngineArgs
        from pagewire.workers.process.wiring import open_runner

        args = EngineArgs(**arguments, max_num_seqs=MANY, max_num_batched_tokens=2048, max_model_len=1024)
        self.config = EngineConfig.resolve(args).worker_config()
        self.runner, self.ready = open_runner(self.config, lambda *_: None)

    def prefill(self, num_requests: int, length: int) -> float:
        """Seconds that prompts of `length` tokens take, one for each request; a step takes all that fit."""
        from pagewire.ipc.wire.params import SamplingParams
        from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan

        begin = time.perf_counter()
        per_request = 512 // self.config.block_size
        per_step = self.config.max_num_batched_tokens // length
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=512)
        for first in range(0, num_requests, per_step):
            slots = range(first, min(first + per_step, num_requests))
            inits = []
            for slot in slots:
                prompt = [random.randrange(self.ready.vocab_size) for _ in range(length)]
                blocks = list(range(slot * per_request, (slot + 1) * per_request))
                inits.append(SlotInit(slot, prompt, length, blocks, params, 0))
            self.runner.step(StepPlan(0, [Row(slot, 0, length, num_samples=1) for slot in slots], inits))
        return time.perf_counter() - begin

    def decode(self, num_requests: int) -> float:
        """Seconds of the fastest of a few steps in which each of them makes a token."""
        from pagewire.ipc.wire.worker_messages import Row, StepPlan

        times = []
        for step in range(STEPS[num_requests]):
            rows = [Row(slot, MIDDLE + step, 1, num_samples=1) for slot in range(num_requests)]
            begin = time.perf_counter()
            self.runner.step(StepPlan(0, rows, []))
            times.append(time.perf_counter() - begin)
        return min(times)


def run_worker(arguments: dict[str, Any]) -> None:
    """Answer each line of standard input, "one", "many" or "prompts" (of many), by the seconds of a turn."""
    worker = Worker(arguments)
    worker.prefill(MANY, MIDDLE)
    works = {
        "one": lambda: worker.decode(1),
        "many": lambda: worker.decode(MANY),
        "prompts": lambda: worker.prefill(MANY, LENGTH),
    }
    print("@ready", flush=True)
    for line in sys.stdin:
        print(f"@{works[line.strip()]()}", flush=True)


class Process:
    """A worker in a process of its own, with the environment of an interpreter."""

    def __init__(self, python: str, arguments: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--worker", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",  # not here, where the version of this folder would be imported
        )

    def answer(self) -> str:
        """The next line that is one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return line[1:].strip()
        raise RuntimeError(f"a worker ended (status {self.process.wait()}); its messages above tell why")

    def run(self, work: str) -> float:
        """Seconds of a turn."""
        assert self.process.stdin is not None
        self.process.stdin.write(work + "\n")
        self.process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measured(processes: list[Process], turns: int) -> list[tuple[float, float]]:
    """Tokens per second of each worker: of one request, and of many with their prompts."""
    best: list[dict[str, float]] = [{} for _ in processes]
    for work, count in (("one", turns), ("many", turns), ("prompts", max(1, turns // 4))):
        if work == "prompts":
            [process.run(work) for process in processes]
        for _ in range(count):
            for values, process in zip(best, processes, strict=True):
                values[work] = min(values.get(work, 1e9), process.run(work))
    print(best, file=sys.stderr, flush=True)
    return [(1 / v["one"], MANY * NEW / (v["prompts"] + (NEW - 1) * v["many"])) for v in best]


def token_bytes(model: Path, quantization: str | None, chosen: int) -> int:
    """Bytes of weights that a token reads, alone in its step."""
    from pagewire.kernels.cpu.library import expected_isa
    from pagewire.workers.checkpoint.headers import read_headers
    from pagewire.workers.estimate.figures import footprint

    sizes = footprint(read_headers(model), expected_isa(), "auto", quantization=quantization)
    all_experts = sum(part.packed_bytes for part in sizes.parts if part.part == "experts")
    others = sum(part.read_bytes for part in sizes.parts if part.part != "experts")
    return others + all_experts * chosen // sizes.dimensions.num_experts


def compare(model: Path, before: str, quantization: str | None, chosen: int, turns: int) -> list[str]:
    """The table's row of a form of the model."""
    from benchmarks.limits import measure_limits

    arguments = {
        "model": str(model),
        "quantization": quantization,
        "hf_overrides": {"num_experts_per_tok": chosen},
        "weight_cache": False,
    }
    processes = [Process(python, arguments) for python in (before, sys.executable)]
    for process in processes:
        process.answer()
    rate = measure_limits().read_bytes_per_s
    (one_before, many_before), (one, many) = measured(processes, turns)
    for process in processes:
        process.close()
    rate = max(rate, measure_limits().read_bytes_per_s)
    share = one * token_bytes(model, quantization, chosen) / rate
    return [
        *(quantization or "bf16", f"{chosen} of 16"),
        *(
            f"{one_before:.1f}",
            f"{one:.1f}",
            f"{one / one_before:.2f}",
            f"{share:.0%} of {rate / 1e9:.0f} GB/s",
        ),
        *(f"{many_before:.0f}", f"{many:.0f}", f"{many / many_before:.2f}"),
    ]


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--before", required=True, metavar="PYTHON")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--chosen", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    from benchmarks.limits import processor

    print(processor())
    one = ["one request: tokens/s before", "after", "ratio", "share of the floor"]
    rows = [["weights", "experts", *one, f"{MANY} x {LENGTH}/{NEW} before", "after", "ratio"]]
    rows.append(["---"] * len(rows[0]))
    for quantization in options.quantization:
        for chosen in options.chosen:
            form = None if quantization == "none" else quantization
            rows.append(compare(options.model.resolve(), options.before, form, chosen, options.turns))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(json.loads(sys.argv[2]))
    else:
        main()
