"""Two versions of pagewire give the same tokens, to the bit of their log probabilities, on every kind of model.

    python -m benchmarks.same_tokens --peer ../before/.venv/bin/python

Tiny random models of all kinds are written once: every architecture that generates, in float32 and some in bfloat16
and with quantised weights, and those that embed and classify. The interpreter of each version runs 50 prompts
through each of them, by its own worker. What differs, or fails in one version only, is named at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.workers.architectures import SERVED
from tests.workers.pooled import CAUSAL, ENCODERS, MORE_ENCODERS, write

HEADS = {"embed": "AutoModel", "classify": "AutoModelForSequenceClassification"}
"""The class of transformers whose models pool so."""
Kind = tuple[str, str, str, dict[str, Any]]
"""Name, task, folder, and options of the worker."""
NUM_PROMPTS = 50
STACKS = ("llama", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "gpt2")
"""Architectures that run in other dtypes and with quantised weights as well."""
PROGRAM = """
import hashlib, json, logging, random, sys
from pathlib import Path
from tests.workers.driver import Driver, SamplingParams, load_runner  # whatever rooms a version has
from tests.workers.pooled import PoolingParams, pool

logging.disable()
numbers = random.Random(0)
PROMPTS = [[numbers.randrange(3, 120) for _ in range(numbers.randrange(1, 40))] for _ in range(int(sys.argv[1]))]

def generated(runner):
    for first in range(0, len(PROMPTS), 8):
        prompts = PROMPTS[first : first + 8]
        params = [SamplingParams(temperature=float(i % 2), logprobs=2) for i in range(len(prompts))]
        for request in Driver(runner).run(prompts, 12, params):
            yield request.output, request.logprobs

def pooled(runner, task):
    for first in range(0, len(PROMPTS), 8):
        for result in pool(runner, PROMPTS[first : first + 8], PoolingParams(task=task)):
            yield result.tolist()

for line in sys.stdin:
    name, task, folder, options = json.loads(line)
    try:
        runner, _ = load_runner(Path(folder), num_blocks=256, **options)
        results = list(generated(runner) if task == "generate" else pooled(runner, task))
        answer = hashlib.sha256(repr(results).encode()).hexdigest()
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps([name, answer]), flush=True)
"""
WHERE = "import pagewire.frontend; print(next(iter(pagewire.frontend.__path__)))"


def kinds(folder: Path) -> list[Kind]:
    """Every kind of model, written to a folder."""
    found: list[Kind] = []
    for name, architecture in SERVED.items():
        path = str(architecture.write(folder / f"causal {name}"))
        found.append((name, "generate", path, {"dtype": "float32"}))
        if name in STACKS:
            found.append((f"{name} bfloat16", "generate", path, {"dtype": "bfloat16"}))
            found += [
                (f"{name} {scheme}", "generate", path, {"dtype": "bfloat16", "quantization": scheme})
                for scheme in ("int8", "int4")
            ]
    for name in sorted({*ENCODERS, *MORE_ENCODERS, *CAUSAL}):
        for task in ("embed", "classify"):
            try:
                path = str(write(folder / f"{task} {name}", name, HEADS[task]))
            except ValueError:
                continue  # transformers has no such class
            found.append(
                (f"{name} {task}", task, path, {"dtype": "float32", "convert": task, "runner": "pooling"})
            )
    return found


def answers(python: str, lines: str) -> subprocess.Popen[str]:
    """The program in an interpreter, in the folder of its own version."""
    where = subprocess.run([python, "-c", WHERE], capture_output=True, text=True, check=True, cwd="/").stdout
    process = subprocess.Popen(
        [python, "-c", PROGRAM, str(NUM_PROMPTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(where.strip()).parent,
    )
    assert process.stdin is not None
    process.stdin.write(lines)
    process.stdin.close()
    return process


def main() -> None:
    """Run both versions side by side, and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", required=True, help="the interpreter in whose environment the other version is"
    )
    parser.add_argument("--only", help="kinds with this in their names")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [kind for kind in kinds(Path(folder)) if args.only is None or args.only in kind[0]]
        lines = "".join(f"{json.dumps(kind)}\n" for kind in chosen)
        processes = [answers(python, lines) for python in (sys.executable, args.peer)]
        differing, failing = 0, 0
        for _ in chosen:
            (name, own), (_, other) = (json.loads(process.stdout.readline()) for process in processes)  # type: ignore[union-attr]
            if ": " in own and ": " in other:
                failing += 1
                print(f"{name} runs in neither: {own}", flush=True)
            elif own != other:
                differing += 1
                print(f"{name}: {own} here, {other} there", flush=True)
    same = len(chosen) - differing - failing
    print(
        f"{same} of {len(chosen)} kinds of models: the same tokens and log probabilities, or vectors, of "
        f"{NUM_PROMPTS} prompts; {differing} differ, {failing} run in neither; {time.monotonic() - began:.0f} s"
    )
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
