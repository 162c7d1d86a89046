"""pagewire end to end on a GPU, with random bfloat16 weights of the shapes of real models.

    python -m benchmarks.gpu.models [--model llama-3-8b] [--quick] [--adapters] [--quantization int4]
                                    [--batch-invariant] [--out FOLDER]

For each model: output tokens per second and their share of the floor (weights and KV cache streamed at the rate of
a large copy, prompts multiplied at the rate of a large product, both measured here), the time to the first token,
and how long the GPU waited between steps; with and without CUDA graphs; transformers' `generate` beside it.

With --adapters: what LoRA adapters cost if none is used, one for all requests, or 8 in turn, with and without CUDA
graphs, and how many of the first tokens are the same with both. If these are too few, this ends with an error.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines.driver import prompts
from benchmarks.kernels.timing import floors
from benchmarks.limits import Limits, floor_seconds
from benchmarks.lora import write_adapter

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
SIZES_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
}
SIZES_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "rope_theta": 1000000.0,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
QWEN_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "norm_topk_prob": True,
}
"""A quarter of the layers of Qwen3-30B-A3B: 8 billion weights, and a token is multiplied with 1 billion."""
MODELS = {
    "llama-3.2-1b": LLAMA | SIZES_1B | {"head_dim": 64, "tie_word_embeddings": True},
    "llama-3-8b": LLAMA | SIZES_8B,
    "qwen3-8b": LLAMA | QWEN,
    "qwen3-moe": LLAMA | QWEN | QWEN_EXPERTS,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""Sizes of a model that shows that everything runs."""
TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
"""And of its experts, if it has some."""
RANK = 16
BITS = {None: 16, "int4": 5, "int8": 8.5}
"""Of a weight as it is read, with its scales and offsets, by how it is quantised."""


@dataclass(frozen=True)
class Work:
    """`count` requests of `input` random tokens, `output` new ones each."""

    count: int
    input: int
    output: int

    @property
    def label(self) -> str:
        """For the table."""
        return f"{self.count} x {self.input}/{self.output}"


FEW = [Work(1, 128, 128), Work(256, 128, 128)]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    works: with graphs. others: without, and by transformers; empty leaves both out. lengths: of prompts, for the
    time to the first token. runs: of each work.
    """

    works: Sequence[Work]
    others: Sequence[Work]
    lengths: Sequence[int] = (128, 1024)
    runs: int = 2
    adapted: Work = Work(32, 128, 128)
    num_adapters: int = 8
    device: str = "cuda"


FULL = Scale(
    [Work(count, *sizes) for sizes in ((128, 128), (1024, 256)) for count in (1, 32, 256)], others=FEW
)
QUICK = Scale(FEW, others=[], lengths=(128,), runs=1)
SMALL = Scale([Work(2, 8, 4)], [Work(1, 8, 4)], (8,), 1, Work(16, 8, 32), num_adapters=2, device="cpu")
"""Shows on a CPU that everything runs."""


def sizes_of(name: str, is_gpu: bool) -> dict[str, Any]:
    """The configuration of a model; without a GPU a tiny one of the same kind."""
    sizes = MODELS[name]
    return sizes if is_gpu else sizes | TINY | (TINY_EXPERTS if "num_experts" in sizes else {})


class Pagewire:
    """Our engine, as a program would use it."""

    def __init__(self, folder: Path, graphs: bool, device: str, **options: Any) -> None:
        from pagewire import LLM

        begin = time.perf_counter()
        self.llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            device=device,
            max_model_len=4096,
            max_num_batched_tokens=8192,
            enforce_eager=not graphs,
            **options,
        )
        self.start_s = time.perf_counter() - begin

    def run(self, work: Work, seed: int, adapters: list[Any] | None = None) -> dict[str, Any]:
        """Seconds, what the worker says of them, and the tokens. adapters: of each request."""
        from pagewire import SamplingParams, TokensPrompt

        batch = prompts({"count": work.count, "input": work.input, "shared": 0, "seed": seed})
        params = SamplingParams(temperature=0.0, max_tokens=work.output, ignore_eos=True, detokenize=False)
        before = self._worker()
        begin = time.perf_counter()
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in batch],
            params,
            use_tqdm=False,
            lora_request=adapters,
        )
        seconds = time.perf_counter() - begin
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if [len(ids) for ids in tokens] != [work.output] * work.count:
            raise RuntimeError(f"{work.label}: not every request got its tokens")
        busy, idle = (now - then for now, then in zip(self._worker(), before, strict=True))
        return {"seconds": seconds, "idle": idle / (busy + idle), "tokens": tokens}

    def _worker(self) -> tuple[float, float]:
        status = self.llm.llm_engine.session.call("status").result()
        return status["worker_busy_s"], status["worker_idle_s"]

    def close(self) -> None:
        """End its processes."""
        self.llm.shutdown()


def measure(
    engine: Pagewire, works: Sequence[Work], scale: Scale, folder: Path, limits: Limits, bits: float = 16
) -> dict[str, Any]:
    """Each work some times, after one that warms up: medians. bits: of a weight as it is read."""
    engine.run(Work(8, 64, 16), seed=0)
    report: dict[str, Any] = {"start_s": engine.start_s}
    for work in works:
        runs = [engine.run(work, seed=1 + run) for run in range(scale.runs)]
        seconds = statistics.median(run["seconds"] for run in runs)
        floor = floor_seconds(limits, folder, work.count, work.input, work.output, shared=0, bits=bits)
        report[work.label] = {
            "tokens_per_s": work.count * work.output / seconds,
            "of_floor": floor / seconds,
            "idle": statistics.median(run["idle"] for run in runs),
        }
    for length in scale.lengths:
        times = [engine.run(Work(1, length, 1), seed=10 + run)["seconds"] for run in range(5)]
        report[f"ttft {length}"] = {"ms": 1e3 * statistics.median(times)}
    return report


def measure_adapters(folder: Path, scale: Scale) -> dict[str, Any]:
    """Tokens per second of an engine that serves adapters, and whether recorded steps make the tokens of others.

    Raises:
        RuntimeError: fewer than half as many tokens are the same as without adapters, or adapters change no token.
    """
    from pagewire import LoRARequest

    work, report = scale.adapted, dict[str, Any]()
    loras = [
        LoRARequest(f"adapter {n}", n, str(write_adapter(folder, folder / f"adapter-{n}", RANK, seed=n)))
        for n in range(1, scale.num_adapters + 1)
    ]
    kinds: dict[str, list[Any]] = {
        "none used": [None] * work.count,
        "one adapter": [loras[0]] * work.count,
        f"{scale.num_adapters} adapters": [loras[i % scale.num_adapters] for i in range(work.count)],
    }
    tokens: dict[tuple[str, bool], list[list[int]]] = {}
    for graphs in (True, False):
        limits = {"max_loras": scale.num_adapters, "max_lora_rank": RANK}
        engine = Pagewire(folder, graphs, scale.device, enable_lora=True, **limits)
        for kind, adapters in kinds.items():
            engine.run(work, 0, adapters)
            runs = [engine.run(work, 1 + run, adapters) for run in range(scale.runs)]
            seconds = statistics.median(run["seconds"] for run in runs)
            name = f"{kind}, {'graphs' if graphs else 'eager'}"
            report[name] = {"tokens_per_s": work.count * work.output / seconds}
            tokens[kind, graphs] = runs[0]["tokens"]
        engine.close()
    for kind in kinds:
        report[f"{kind}, same tokens"] = same = same_share(tokens[kind, True], tokens[kind, False])
        if same < report["none used, same tokens"] / 2:
            raise RuntimeError(f"{kind}: recorded steps make {same:.0%} of the tokens of others: {report}")
        if kind != "none used" and tokens[kind, True] == tokens["none used", True]:
            raise RuntimeError(f"{kind}: the adapters change no token")
    return report


def same_share(ours: list[list[int]], theirs: list[list[int]], first: int = 8) -> float:
    """The share of equal tokens among the first of each output, before the first that differs.

    Random weights make many tokens nearly as likely, so a last bit changes one in some dozens, and all behind it.
    """
    pairs = [list(zip(a[:first], b[:first], strict=True)) for a, b in zip(ours, theirs, strict=True)]
    same = [next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]
    return sum(same) / sum(len(pair) for pair in pairs)


def measure_transformers(folder: Path, works: Sequence[Work], device: str) -> dict[str, Any]:
    """`generate` with PyTorch's attention, one batch at a time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        config = AutoConfig.from_pretrained(folder)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    report = {}
    for work in works:
        batch = {"count": work.count, "input": work.input, "shared": 0, "seed": 1}
        ids = torch.tensor(prompts(batch), device=device)
        times = []
        for num_out in (4, work.output):
            wait(device)
            begin = time.perf_counter()
            with torch.inference_mode():
                module.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=num_out,
                    min_new_tokens=num_out,
                    do_sample=False,
                    pad_token_id=0,
                )
            wait(device)
            times.append(time.perf_counter() - begin)
        report[work.label] = {"tokens_per_s": work.count * work.output / times[-1]}
    del module
    gc.collect()
    torch.cuda.empty_cache()
    return report


def wait(device: str) -> None:
    """Wait for the work of a device."""
    if device != "cpu":
        torch.cuda.synchronize()


def run_model(
    sizes: dict[str, Any],
    scale: Scale,
    limits: Limits,
    *,
    adapters: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The figures of a model, which are printed as well. sizes: its configuration. options: of the engine."""
    report, quantization = dict[str, Any](), options.get("quantization")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "config.json").write_text(json.dumps(sizes))
        if adapters:
            report["adapters"] = measure_adapters(folder, scale)
            print("adapters", json.dumps(report["adapters"], indent=1), flush=True)
            return report
        for kind, graphs, works in (("graphs", True, scale.works), ("eager", False, scale.others)):
            if works:
                engine = Pagewire(folder, graphs, scale.device, **options)
                report[kind] = measure(engine, works, scale, folder, limits, BITS[quantization])
                engine.close()
                print(kind, json.dumps(report[kind], indent=1), flush=True)
        if scale.others and quantization is None:
            report["transformers"] = measure_transformers(folder, scale.others, scale.device)
            print("transformers", json.dumps(report["transformers"], indent=1), flush=True)
    return report


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure whole models on a GPU.")
    parser.add_argument("--model", choices=MODELS, action="append", help="may be given again")
    parser.add_argument("--quick", action="store_true", help="fewer works, with graphs only, and no peer")
    parser.add_argument("--adapters", action="store_true", help="LoRA adapters, and nothing else")
    parser.add_argument("--quantization", choices=list(filter(None, BITS)), help="of the weights")
    parser.add_argument("--batch-invariant", action="store_true", help="no bit depends on the batch")
    parser.add_argument("--out", type=Path, help="folder of a JSON file of all figures")
    options = parser.parse_args()
    copy, rate = floors("cuda:0")
    torch.cuda.empty_cache()
    limits = Limits(copy, rate)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "limits": asdict(limits), "models": {}}
    scale = QUICK if options.quick else FULL
    for name in options.model or MODELS:
        print(name)
        report["models"][name] = run_model(
            MODELS[name],
            scale,
            limits,
            adapters=options.adapters,
            quantization=options.quantization,
            batch_invariant=options.batch_invariant,
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        kind = "adapters" if options.adapters else options.quantization or "models"
        file = options.out / f"{kind}-{report['device'].replace(' ', '-')}-{datetime.date.today()}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
