"""Encoders end to end on a GPU, with random weights of the shapes of real models: right, and how fast.

    python -m benchmarks.gpu.encoders [--model all-MiniLM-L6-v2] [--quick] [--out benchmarks/results]

Embeddings of prompts of many lengths are compared with those of transformers in float32 on the CPU: exit status 1
if a cosine is below that of `LEAST`. For one of them, in every dtype, also texts per second, of 128 tokens each;
transformers' module on the same device beside it. `--device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.limits import processor
from pagewire import LLM, TokensPrompt

VOCAB_SIZE = 30522
BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
}
MINI_LM = BASE | {"hidden_size": 384, "intermediate_size": 1536}
DEBERTA = BASE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-MiniLM-L6-v2": ("bert", MINI_LM),
    "all-mpnet-base-v2": ("mpnet", BASE | {"max_position_embeddings": 514}),
    "ModernBERT-base": ("modernbert", BASE | {"intermediate_size": 1152, "local_attention": 128}),
    "nomic-embed-text-v1": ("nomic_bert", BASE),
    "deberta-v3-small": ("deberta-v2", DEBERTA | {"norm_rel_ebd": "layer_norm"}),
}
"""Model type and configuration; at most 6 layers, since the shapes of all layers are the same."""
MEASURED = "all-MiniLM-L6-v2"
LEAST = {"float32": 0.999999, "float16": 0.99999, "bfloat16": 0.999}
"""The least cosine between an embedding in a dtype and transformers' in float32."""
CHECKED = (1, 2, 15, 16, 17, 64, 100, 127, 128, 129, 200, 255, 256, 257, 400, 510)  # tokens
TEXTS, TOKENS, PEER_BATCH, RUNS = 4096, 128, 256, 3


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    """Random token ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, VOCAB_SIZE, length).tolist() for length in lengths]


def write(folder: Path, name: str) -> Path:
    """A checkpoint with random weights, large enough for embeddings of different texts to differ."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model_type, fields = MODELS[name]
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, initializer_range=0.06, **fields)
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def expected(folder: Path, prompts: list[list[int]]) -> np.ndarray:
    """The means of transformers' hidden states, in float32 on the CPU, one prompt at a time."""
    from transformers import AutoModel

    module = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        means = [module(torch.tensor([ids]))[0][0].mean(0) for ids in prompts]
    return torch.stack(means).numpy()


def load(folder: Path, device: str, dtype: str) -> LLM:
    """Our engine, as a program would use it."""
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        device=device,
        dtype=dtype,
        max_num_batched_tokens=16384,
        max_num_seqs=256,
        pooler_config={"pooling_type": "MEAN", "normalize": False},
    )


def embeddings(llm: LLM, prompts: list[list[int]]) -> np.ndarray:
    """The embeddings [n, H] of prompts."""
    outputs = llm.embed([TokensPrompt(prompt_token_ids=ids) for ids in prompts], use_tqdm=False)
    return np.stack([np.frombuffer(output.outputs.tensor.data, np.float32) for output in outputs])


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each row of a with each row of b."""
    x, y = (m.astype(np.float64) / np.linalg.norm(m.astype(np.float64), axis=1)[:, None] for m in (a, b))
    return np.asarray(x @ y.T)


def check(llm: LLM, prompts: list[list[int]], truth: np.ndarray) -> dict[str, float]:
    """How near embeddings are to transformers', and for comparison how near different ones are to each other."""
    own = cosines(embeddings(llm, prompts), truth)
    others = own[~np.eye(len(own), dtype=bool)]
    return {"cosine": float(np.diag(own).min()), "cosine_of_others": float(np.median(others))}


def texts_per_second(llm: LLM, count: int) -> float:
    """Of texts of `TOKENS` tokens, after a run that warms up; the median."""
    rates = []
    for run in range(RUNS + 1):
        prompts = random_prompts([TOKENS] * count, seed=run)
        begin = time.perf_counter()
        embeddings(llm, prompts)
        rates.append(count / (time.perf_counter() - begin))
    return statistics.median(rates[1:])


def peer_texts_per_second(folder: Path, device: str, dtype: str, count: int) -> float:
    """Likewise, of transformers' module with PyTorch's attention."""
    from transformers import AutoModel

    module = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    rates = []
    for run in range(RUNS + 1):
        prompts = torch.tensor(random_prompts([TOKENS] * count, seed=run))
        begin = time.perf_counter()
        with torch.inference_mode():
            for part in torch.split(prompts, PEER_BATCH):
                module(part.to(device))[0].float().mean(1).cpu()
        rates.append(count / (time.perf_counter() - begin))
    return statistics.median(rates[1:])


def run_model(folder: Path, name: str, device: str, quick: bool) -> dict[str, Any]:
    """Check a model: in float16, or in each dtype if it is the one that is measured."""
    prompts = random_prompts(list(CHECKED), seed=0)
    truth = expected(write(folder, name), prompts)
    count = 64 if quick else TEXTS
    found: dict[str, Any] = {}
    for dtype in LEAST if name == MEASURED else ("float16",):
        begin = time.perf_counter()
        llm = load(folder, device, dtype)
        row = found[dtype] = {"start_s": time.perf_counter() - begin, **check(llm, prompts, truth)}
        row["good"] = row["cosine"] >= LEAST[dtype]
        if name == MEASURED:
            row["texts_per_s"] = texts_per_second(llm, count)
        llm.shutdown()
        if name == MEASURED:
            row["transformers_texts_per_s"] = peer_texts_per_second(folder, device, dtype, count)
        print(name, dtype, json.dumps(row), flush=True)
    return found


def main() -> int:
    """Check, measure, print, write. Exit status 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description="Check and measure encoders on a GPU.")
    parser.add_argument("--model", choices=MODELS, action="append", help="may be given again")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few texts")
    parser.add_argument("--out", type=Path, help="folder of a JSON file of all figures")
    options = parser.parse_args()
    is_gpu = options.device != "cpu"
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if is_gpu else processor(),
        "models": {},
    }
    for name in options.model or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            report["models"][name] = run_model(Path(folder), name, options.device, options.quick)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"encoders-{report['device'].replace(' ', '-')}-{datetime.date.today()}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [name for name, rows in report["models"].items() if not all(row["good"] for row in rows.values())]
    print(f"{len(wrong)} of {len(report['models'])} wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
