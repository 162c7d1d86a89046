"""Decode steps of hybrids of about 300M weights, beside transformers' on the same weights, in turn.

    python -m benchmarks.hybrid_speed FOLDER --dtype float32 [--only lfm2-300m]

FOLDER is what `benchmarks.make_hybrid` has written. A step is one token of each request, with sampling;
transformers runs its model's forward on its own cache, and takes the largest logit. Both have the same threads, and
do a step in turn, so that a busy machine slows both; the ratio is that of the medians. With a single thread, times
are those of the processor, to which neighbours add little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.limits import processor
from benchmarks.make_hybrid import SHAPES
from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.process.wiring import open_runner

PROMPT, VOCABULARY = 64, 32000
Step = Callable[[], object]


def our_step(folder: Path, dtype: str, prompts: list[list[int]], most: int) -> Step:
    """A step of a runner after prompts, of at most `most` steps."""
    args = EngineArgs(
        model=str(folder),
        dtype=dtype,
        max_num_seqs=len(prompts),
        max_model_len=PROMPT + most + 16,
        skip_tokenizer_init=True,
        num_threads=torch.get_num_threads(),
        kv_cache_memory_bytes=1 << 31,
    )
    config = EngineConfig.resolve(args).worker_config()
    runner, _ = open_runner(config, lambda *_: None)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most)
    needed = -(-(PROMPT + most) // config.block_size)
    for slot, prompt in enumerate(prompts):
        init = SlotInit(slot, prompt, PROMPT, list(range(slot * needed, (slot + 1) * needed)), params, 0)
        row = Row(slot, 0, PROMPT, num_samples=1, states=[(PROMPT, slot)])
        runner.step(StepPlan(0, [row], [init]))
    length = PROMPT

    def step() -> None:
        nonlocal length
        rows = [
            Row(slot, length, 1, num_samples=1, state=slot, states=[(length + 1, slot)])
            for slot in range(len(prompts))
        ]
        runner.step(StepPlan(0, rows, []))
        length += 1

    return step


def their_step(folder: Path, dtype: str, prompts: list[list[int]]) -> Step:
    """The same of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    names = ("past_key_values", "cache_params")

    def forward(ids: torch.Tensor, kept: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        with torch.inference_mode():
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **kept)
        cache = {name: found for name in names if (found := getattr(out, name, None)) is not None}
        return out.logits[:, -1].argmax(-1)[:, None], cache

    state = forward(torch.tensor(prompts), {})

    def step() -> None:
        nonlocal state
        state = forward(*state)

    return step


def in_turn(steps: list[Step], rounds: int) -> list[float]:
    """The median seconds of each, after a round that does not count."""
    times: list[list[float]] = [[] for _ in steps]
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds + 1):
        for step, own in zip(steps, times, strict=True):
            begin = clock()
            step()
            own.append(clock() - begin)
    return [statistics.median(own[1:]) for own in times]


def main() -> None:
    """Print a line for each model and number of requests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=SHAPES, help="this one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{processor()}; {options.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in [options.only] if options.only else SHAPES:
        for count in options.requests:
            torch.manual_seed(0)
            prompts = torch.randint(10, VOCABULARY, (count, PROMPT)).tolist()
            folder = options.folder / name
            steps = [
                our_step(folder, options.dtype, prompts, options.rounds + 2),
                their_step(folder, options.dtype, prompts),
            ]
            ours, theirs = in_turn(steps, options.rounds)
            print(
                f"{name:14} {count:3} requests: ours {1e3 * ours:8.1f} ms, transformers {1e3 * theirs:8.1f} ms, "
                f"ratio {theirs / ours:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
