"""A model beside transformers' continuous batching (`generate_batch`): the same prompts, tokens per second of both.

The peer runs in a process of its own, with a time limit. What it cannot do is an error in the result, for it says
nothing of our engine.

    python -m benchmarks.gpu.peer FOLDER WORK DEVICE      that process; WORK: JSON, see `benchmarks.engines.driver`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.engines.driver import prompts
from benchmarks.gpu.models import Pagewire, Work

LIMIT = 90.0
"""Seconds that the peer has, from the start of its process on."""
REHEARSED_BLOCKS = 64
"""Of 256 tokens, in the KV cache of a rehearsal on a CPU; by default the memory that is free decides."""


def compare(sizes: dict[str, Any], work: Work, device: str) -> dict[str, Any]:
    """Both engines, one after the other, with random weights. sizes: the model's configuration."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "config.json").write_text(json.dumps(sizes))
        engine = Pagewire(folder, True, device)
        engine.run(work, seed=0)
        ours = work.count * work.output / engine.run(work, seed=1)["seconds"]
        engine.close()
        theirs = in_process(folder, work, device)
    report = {"work": work.label, "tokens_per_s": ours, "generate_batch": theirs}
    return report | ({"ratio": ours / theirs["tokens_per_s"]} if "error" not in theirs else {})


def in_process(folder: Path, work: Work, device: str, limit: float = LIMIT) -> dict[str, Any]:
    """The peer's figures, or its `error`."""
    asked = {"count": work.count, "input": work.input, "output": work.output, "shared": 0}
    command = [sys.executable, "-m", "benchmarks.gpu.peer", str(folder), json.dumps(asked), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit:.0f} s"}
    print(done.stdout + done.stderr)  # transformers logs what goes wrong in its thread
    if done.returncode != 0:
        return {"error": f"exit status {done.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def generate(folder: Path, work: dict[str, int], device: str) -> dict[str, Any]:
    """Run `generate_batch` twice: the first run warms up, and other prompts find no prefix of theirs in its cache.

    Raises:
        RuntimeError: not every request got its tokens.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    with torch.device(device):
        config = AutoConfig.from_pretrained(folder)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generation = GenerationConfig(
        max_new_tokens=work["output"], do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(num_blocks=REHEARSED_BLOCKS if device == "cpu" else None)
    times = []
    for seed in (0, 1):
        batch = prompts(work | {"seed": seed})
        begin = time.perf_counter()
        outputs = module.generate_batch(
            batch,
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,  # which has the graphs of the first run
        )
        times.append(time.perf_counter() - begin)
        done = [output for output in outputs.values() if len(output.generated_tokens) == work["output"]]
        if len(done) != work["count"]:
            errors = [output.error for output in outputs.values() if output.error]
            raise RuntimeError(f"{len(done)} of {work['count']} requests got their tokens {errors[:1]}")
    return {
        "transformers": transformers.__version__,
        "attention": module.config._attn_implementation,
        "first_s": times[0],
        "tokens_per_s": work["count"] * work["output"] / times[1],
    }


def main(folder: str, work: str, device: str) -> None:
    """Print the figures, or the error's first line, as the last line. Ends this process."""
    try:
        figures = generate(Path(folder), json.loads(work), device)
    except Exception as error:
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    print(json.dumps(figures), flush=True)
    os._exit(0)  # nothing waits for the threads of `generate_batch`


if __name__ == "__main__":
    main(*sys.argv[1:])
