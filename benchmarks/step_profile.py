"""Where a decode step's time goes, in a worker without a core.

    python -m benchmarks.step_profile MODEL REQUESTS TOKENS [--quantization int8]

Two passes over the same steps. The first takes the steps' times as they are. The second runs the layers kernel by
kernel, with a clock around each kind, and says which share of the step each has. What the worker waits for between
steps, and messages, are the core's: `benchmarks.compare` prints the idle share.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.kernels.cpu.experts import CompiledExperts
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.linear import PackedLinear
from pagewire.kernels.cpu.quantised import QuantisedLinear
from pagewire.workers.device.cpu import CpuTokenSampler
from pagewire.workers.network.network import Network
from pagewire.workers.process.wiring import open_runner
from pagewire.workers.run import launch

KINDS = {
    (PackedLinear, "__call__"): "products",
    (QuantisedLinear, "__call__"): "products",
    (CompiledExperts, "__call__"): "experts",
    (CpuKernels, "route"): "experts",
    (CpuKernels, "paged_attention"): "attention",
    (CpuKernels, "store_kv"): "KV writes",
    (CpuKernels, "rms_norm"): "norms",
    (CpuKernels, "add_rms_norm"): "norms",
    (CpuKernels, "activate_and_mul"): "activation",
    (CpuKernels, "rotary"): "rotary",
    (CpuTokenSampler, "launch"): "sampling",
    (launch, "build_batch"): "batch building",
}


class Steps:
    """A runner with requests that decode for ever."""

    def __init__(
        self, model: str, quantization: str | None, num_requests: int, num_tokens: int, num_steps: int
    ) -> None:
        args = EngineArgs(model=model, quantization=quantization, max_num_seqs=num_requests)
        load = EngineConfig.resolve(args).worker_config()
        self.runner, ready = open_runner(load, lambda *_: None)
        self.num_requests, self.length = num_requests, num_tokens
        per_request = -(-(num_tokens + 2 * num_steps) // load.block_size)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 * num_steps)
        for slot in range(num_requests):
            prompt = [random.randrange(ready.vocab_size) for _ in range(num_tokens)]
            blocks = list(range(slot * per_request, (slot + 1) * per_request))
            init = SlotInit(slot, prompt, num_tokens, blocks, params, 0)
            self.runner.step(StepPlan(0, [Row(slot, 0, num_tokens, num_samples=1)], [init]))

    def run(self, num_steps: int) -> list[float]:
        """Seconds of each of so many steps."""
        times = []
        for _ in range(num_steps):
            rows = [Row(slot, self.length, 1, num_samples=1) for slot in range(self.num_requests)]
            begin = time.perf_counter()
            self.runner.step(StepPlan(0, rows, []))
            times.append(time.perf_counter() - begin)
            self.length += 1
        return times


def timed(seconds: dict[str, float], kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose seconds are added to those of its kind."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[kind] += time.perf_counter() - begin

    return call


def main() -> None:
    """Print a table, and a line of JSON."""
    parser = argparse.ArgumentParser(description="Where a decode step's time goes.")
    parser.add_argument("model", help="a model folder")
    parser.add_argument("requests", type=int, help="how many decode at once")
    parser.add_argument("tokens", type=int, help="tokens in each one's cache when the steps begin")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quantization", help="quantise plain numbers so, for example int8 or int4")
    options = parser.parse_args()
    steps = Steps(options.model, options.quantization, options.requests, options.tokens, options.steps)
    whole = statistics.median(steps.run(options.steps))

    seconds: dict[str, float] = defaultdict(float)
    for (owner, name), kind in KINDS.items():
        setattr(owner, name, timed(seconds, kind, getattr(owner, name)))
    steps.runner.decoding.run = lambda plan, quiet: None  # it runs all kernels in one call
    if isinstance(base := steps.runner.model.model.base, Network):
        base.stack.compiled = None
    total = sum(steps.run(options.steps))
    shares = {kind: spent / total for kind, spent in sorted(seconds.items(), key=lambda item: -item[1])}
    shares["Python between them"] = 1 - sum(shares.values())
    print(f"step: {1e3 * whole:.2f} ms; kernel by kernel: {1e3 * total / options.steps:.2f} ms, of which")
    for kind, share in shares.items():
        print(f"  {kind:20} {share:6.1%}  {1e3 * share * total / options.steps:7.3f} ms")
    print(json.dumps({"step_ms": 1e3 * whole, "by_kernel_ms": 1e3 * total / options.steps, "shares": shares}))


if __name__ == "__main__":
    main()
