"""llama.cpp's `llama-batched-bench`, found in `$LLAMA_BATCHED_BENCH`; the model is a GGUF file. See driver.py.

It makes its own random tokens. Its time of a work is its own too: without the start, which each work has anew.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from driver import Generate, serve


def start(model: str) -> tuple[Generate, Any]:
    """With its own choice of everything but the threads, which are as many as there are processors."""
    program, threads = os.environ["LLAMA_BATCHED_BENCH"], str(len(os.sched_getaffinity(0)))
    last: dict[str, float] = {}

    def generate(prompts: list[list[int]], num_out: int) -> None:
        count, num_in = len(prompts), len(prompts[0])
        sizes = {"-npp": num_in, "-ntg": num_out, "-npl": count, "-c": count * (num_in + num_out)}
        command = [program, "-m", model, "-t", threads, "-tb", threads, "--output-format", "jsonl"]
        for name, size in sizes.items():
            command += [name, str(size)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        [found] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        last["seconds"] = found["t"]

    return generate, lambda: dict(last)


if __name__ == "__main__":
    serve(start)
