"""Many adapters, few of them in memory: `python -m benchmarks.lora_zipf MODEL`, from the root.

Writes adapters with random numbers for a checkpoint, and sends requests whose adapters follow Zipf's law to a core
that keeps `--resident` of them in memory, while `--streams` requests of the model alone run beside them. Measures
tokens per second, the time to the first token of requests whose adapter had to be read (cold) and of others (warm),
and the slowest gap between two tokens of the streams, with adapters and without any. The last line is all of it as
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.daemon import running_core
from pagewire import AsyncLLM, LoRARequest, RequestOutputKind, SamplingParams


def write_adapters(model: Path, folder: Path, number: int, rank: int) -> list[Path]:
    """Adapters of all attention matrices of a model, each with other numbers. Returns their folders."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(sizes),
        "bias": "none",
    }
    folders = []
    for index in range(number):
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, size in sizes.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                for part, shape in (("lora_A", (rank, hidden)), ("lora_B", (size, rank))):
                    values = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{prefix}.{part}.weight"] = values.to(torch.bfloat16)
        folders.append(folder / f"adapter-{index}")
        folders[-1].mkdir()
        save_file(tensors, folders[-1] / "adapter_model.safetensors")
        (folders[-1] / "adapter_config.json").write_text(json.dumps(settings))
    return folders


@dataclass
class Measured:
    """What one run gave; times in seconds."""

    num_tokens: int = 0
    first_tokens: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "warm": []})
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Rates and percentiles, times in milliseconds."""
        result: dict[str, Any] = {"tokens_per_s": round(self.num_tokens / self.seconds, 1)}
        for kind, values in self.first_tokens.items():
            if values:
                result[f"{kind}_requests"] = len(values)
                result[f"{kind}_ttft_ms"] = milliseconds(values)
        result["stream_gap_ms"] = milliseconds(self.gaps)
        return result


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(values)
    points = {
        "p50": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "max": ordered[-1],
    }
    return {name: round(1000 * value, 1) for name, value in points.items()}


def params(max_tokens: int) -> SamplingParams:
    """Of all requests: greedy, to the end."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


async def stream(llm: AsyncLLM, number: int, over: asyncio.Event, measured: Measured) -> None:
    """Requests of the model alone, one after the other; the times between their tokens."""
    turn = 0
    while not over.is_set():
        turn += 1
        last = None
        prompt = {"prompt_token_ids": [10 + number, 10 + turn % 50, *range(20, 40)]}
        async for output in llm.generate(prompt, params(200)):  # type: ignore[arg-type]
            now = time.perf_counter()
            if last is not None:
                measured.gaps.append(now - last)
            last = now
            measured.num_tokens += sum(len(part.token_ids) for part in output.outputs)


async def one(llm: AsyncLLM, adapter: LoRARequest | None, prompt: list[int], measured: Measured) -> None:
    """A request with an adapter."""
    cold = adapter is not None and adapter.lora_int_id not in set(await llm.list_loras())
    begin = time.perf_counter()
    first = True
    async for output in llm.generate(prompt, params(32), lora_request=adapter):
        if first:
            measured.first_tokens["cold" if cold else "warm"].append(time.perf_counter() - begin)
            first = False
        measured.num_tokens += sum(len(part.token_ids) for part in output.outputs)


async def load(
    llm: AsyncLLM, adapters: Sequence[LoRARequest | None], options: argparse.Namespace
) -> Measured:
    """Requests with these adapters, `concurrency` at a time, beside the streams."""
    measured, over = Measured(), asyncio.Event()
    turns = asyncio.Semaphore(options.concurrency)
    streams = [asyncio.create_task(stream(llm, i, over, measured)) for i in range(options.streams)]
    random_tokens = random.Random(1)
    prompts = [[random_tokens.randrange(10, 1000) for _ in range(64)] for _ in adapters]

    async def limited(adapter: LoRARequest | None, prompt: list[int]) -> None:
        async with turns:
            await one(llm, adapter, prompt, measured)

    begin = time.perf_counter()
    await asyncio.gather(*(limited(a, p) for a, p in zip(adapters, prompts, strict=True)))
    measured.seconds = time.perf_counter() - begin
    over.set()
    await asyncio.gather(*streams)
    return measured


async def run(options: argparse.Namespace, address: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Both runs: the same requests without adapters, and with them."""
    requests = [LoRARequest(folder.name, i + 1, str(folder)) for i, folder in enumerate(folders)]
    weights = [1 / (rank + 1) ** options.exponent for rank in range(len(requests))]
    chosen = random.Random(0).choices(requests, weights, k=options.requests)
    llm = AsyncLLM.attach(address)
    try:
        await load(llm, [None] * 8, options)  # warm up
        plain = await load(llm, [None] * options.requests, options)
        adapted = await load(llm, chosen, options)
        return {
            "distinct_adapters": len({request.lora_int_id for request in chosen}),
            "without_adapters": plain.summary(),
            "with_adapters": adapted.summary(),
        }
    finally:
        llm.shutdown()


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--resident", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--core", nargs=argparse.REMAINDER, default=[], help="further options of the core")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = write_adapters(options.model, Path(place), options.adapters, options.rank)
        limits = ("--max-loras", str(options.resident), "--max-cpu-loras", str(options.resident))
        arguments = ("--model", str(options.model), "--enable-lora", *limits, *options.core)
        with running_core(*arguments) as address:
            result = asyncio.run(run(options, address, folders))
    given = {
        name: getattr(options, name) for name in ("adapters", "resident", "rank", "requests", "concurrency")
    }
    print(json.dumps({"model": options.model.name, **given, "streams": options.streams, **result}))


if __name__ == "__main__":
    main()
