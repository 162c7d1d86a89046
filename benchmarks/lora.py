"""What LoRA adapters cost: the same requests without adapters, with one for all, and with one for each.

    python -m benchmarks.lora MODEL [--rank 16] [--requests 32] [--turns 40] [--busy]

MODEL is a folder of a Llama-like model or a Mixtral; its adapters are random. Two workers without a core are in one
process, one of which serves adapters. They take steps in turn, so that whatever else the machine does slows all;
the medians of the ratios to the step beside count. A ratio is of tokens per second with a prompt of `LENGTH` tokens
and as many after it. On a machine that is busy, processor time of one thread says more than time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.lora import LoadAdapter, LoRAConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan, WorkerConfig
from pagewire.workers.process.wiring import open_runner

LENGTH = 128  # tokens of a prompt, and of its output
PROMPTS_AT_ONCE = 4
clock = time.perf_counter
KINDS = ("enabled, none used", "one adapter", "an adapter each")


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """A random adapter of all linear layers of a Llama, or of a Mixtral with those of its experts."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv_heads, hidden)),
    }
    if num_experts := config.get("num_local_experts", 0):
        experts = [f"block_sparse_moe.experts.{expert}" for expert in range(num_experts)]
        shapes |= {f"{expert}.{leaf}": (inner, hidden) for expert in experts for leaf in ("w1", "w3")}
        shapes |= {f"{expert}.w2": (hidden, inner) for expert in experts}
    else:
        shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))
        shapes["mlp.down_proj"] = hidden, inner
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_out, num_in) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) / 64
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) / 64
    folder.mkdir()
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


class Worker:
    """A runner whose requests have prompts, and then decode tokens."""

    def __init__(self, model: Path, num_requests: int, lora: LoRAConfig | None) -> None:
        args = EngineArgs(
            model=str(model), max_num_seqs=num_requests, max_model_len=4 * LENGTH, weight_cache=False
        )
        self.config: WorkerConfig = EngineConfig.resolve(args).worker_config()
        self.config.lora = lora
        self._awake = threading.Event()
        self.runner, self.ready = open_runner(self.config, lambda *_: None, wake=self._awake.set)
        self.num_requests = num_requests

    def load(self, index: int, folder: Path) -> float:
        """Load an adapter. Returns the seconds that took.

        Raises:
            ValueError: it cannot be loaded.
        """
        began = time.perf_counter()
        self.runner.adapters.load(LoadAdapter(index, str(folder)))
        while not (messages := self.runner.adapters.finished()):
            if not self.runner.adapters.advance():
                self._awake.wait()
                self._awake.clear()
        (message,) = messages
        if message.error is not None:
            raise ValueError(message.error)
        return time.perf_counter() - began

    def prompts(self, adapters: list[int]) -> float:
        """Seconds per request of a step of prompts with these adapters."""
        rows = [Row(slot, 0, LENGTH, num_samples=1) for slot in range(len(adapters))]
        return self._step(rows, adapters, LENGTH) / len(rows)

    def decode(self, adapters: list[int]) -> float:
        """Seconds of a step in which each request makes a token, in the middle of its output.

        What lies in its KV cache does not matter to the time that this takes.
        """
        middle = LENGTH + LENGTH // 2
        rows = [Row(slot, middle - 1, 1, num_samples=1) for slot in range(len(adapters))]
        return self._step(rows, adapters, middle)

    def _step(self, rows: list[Row], adapters: list[int], num_tokens: int) -> float:
        """Seconds of a step of new requests of `num_tokens` tokens, with these adapters."""
        per_request = 2 * LENGTH // self.config.block_size
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=LENGTH)
        inits = []
        for slot, adapter in enumerate(adapters):
            tokens = [random.randrange(self.ready.vocab_size) for _ in range(num_tokens)]
            blocks = list(range(slot * per_request, (slot + 1) * per_request))
            inits.append(SlotInit(slot, tokens, LENGTH, blocks, params, 0, adapter=adapter))
        self.runner.step(StepPlan(0, [], inits))
        began = clock()
        self.runner.step(StepPlan(0, rows, []))
        return clock() - began


def measured(plain: Worker, adapted: Worker, turns: int) -> dict[str, dict[str, float]]:
    """For each kind of batch, the median ratio of its steps' seconds to those of a plain step beside it."""
    count = plain.num_requests
    kinds = dict(zip(KINDS, ([0] * count, [1] * count, list(range(1, count + 1))), strict=True))
    ratios: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for kind, adapters in kinds.items():
        pairs: dict[str, list[float]] = {"prompts": [], "decode": []}
        for turn in range(max(2, turns // 4)):
            first = turn * PROMPTS_AT_ONCE % count
            chosen = adapters[first : first + PROMPTS_AT_ONCE]
            own = plain.prompts([0] * len(chosen))
            pairs["prompts"].append(adapted.prompts(chosen) / own)
        seconds = []
        for _ in range(turns):
            seconds.append(plain.decode([0] * count))
            pairs["decode"].append(adapted.decode(adapters) / seconds[-1])
        ratios[kind] = {name: statistics.median(values) for name, values in pairs.items()}
        ratios[kind]["plain_step_ms"] = 1e3 * statistics.median(seconds)
    prompt_share = statistics.median(plain.prompts([0] * PROMPTS_AT_ONCE) for _ in range(3)) * count
    for values in ratios.values():
        step = values["plain_step_ms"] / 1e3 * LENGTH
        with_adapters = prompt_share * values["prompts"] + step * values["decode"]
        values["tokens_per_s"] = (prompt_share + step) / with_adapters
    return ratios


def main() -> None:
    """Print a table, and a line of JSON."""
    global clock
    from benchmarks.limits import processor

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--busy", action="store_true", help="processor time of one thread in place of time")
    options = parser.parse_args()
    if options.busy:
        clock = time.thread_time
        torch.set_num_threads(1)
    plain = Worker(options.model, options.requests, None)
    adapted = Worker(options.model, options.requests, LoRAConfig(max_lora_rank=options.rank))
    with tempfile.TemporaryDirectory() as folder:
        loads = [
            adapted.load(index, write_adapter(options.model, Path(folder) / str(index), options.rank, index))
            for index in range(1, options.requests + 1)
        ]
    ratios = measured(plain, adapted, options.turns)
    print(f"{processor()}, load {os.getloadavg()[0]:.1f}; rank {options.rank}, {options.requests} requests")
    print("| | prompts, seconds | decode, seconds | tokens/s |\n|---|---|---|---|")
    for kind, values in ratios.items():
        print(f"| {kind} | {values['prompts']:.2f} | {values['decode']:.2f} | {values['tokens_per_s']:.2f} |")
    result: dict[str, Any] = {"ratios": ratios, "load_ms": 1e3 * statistics.median(loads)}
    result["bytes_per_adapter"] = adapted.runner.adapters.num_bytes // options.requests
    print(json.dumps(result))


if __name__ == "__main__":
    main()
