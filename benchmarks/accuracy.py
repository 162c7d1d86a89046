"""What 8 and 4 bits cost: each format of weights, beside the same weights dequantised, and beside bfloat16.

    python -m benchmarks.accuracy MODEL.gguf [FORMAT ...] [--dtype float32]

MODEL.gguf is a Llama, such as SmolLM2-135M-Instruct (`make build/smollm2`), whose weights count as the exact ones.
Each format is made of them by rounding: nothing is calibrated. The text is Python's own documentation, in contexts
of 1,024 tokens. The hidden states and logits of the engine's model are compared with those of transformers on the
dequantised weights in float32: the difference is what the engine adds to a format. Perplexity, beside that of
bfloat16, is what the format itself costs.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from benchmarks.limits import processor
from pagewire.ipc.gguf.file import read_gguf
from pagewire.ipc.gguf.tokenizer import tokenizer_json
from pagewire.ipc.quantization import ONLINE
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.workers.device.cpu import CpuDevice
from pagewire.workers.module.configuration import load_config
from pagewire.workers.module.transforms import tabulate_rotary
from pagewire.workers.network.build_module import build_module
from pagewire.workers.network.loaded import Phases
from pagewire.workers.network.loading import load_model
from pagewire.workers.network.model import Model
from pagewire.workers.ranks.single import SingleRank
from pagewire.workers.step.recorder import DryRunRecorder
from tests.workers.checkpoint.formats.checkpoints import QUANTISED, RECIPES, write_quantised

TEXTS = ("compound", "execmodel")
CONTEXT = 1024
BLOCK = 16
GROUP = 64  # columns with a scale, of formats that have a choice; a divisor of SmolLM2's 576


@dataclass(frozen=True)
class Format:
    """A format of weights: how its files are made of a model's, and the options with which they are served."""

    make: Callable[[Sources, Path], Path]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sources:
    """The exact weights: a GGUF file, and a folder with the same in bfloat16."""

    gguf: Path
    dense: Path


def as_gguf(kind: str) -> Format:
    """All matrices in one of GGUF's types, by the package `gguf`."""

    def make(sources: Sources, folder: Path) -> Path:
        reader, path = gguf.GGUFReader(sources.gguf), folder.with_suffix(".gguf")
        writer = gguf.GGUFWriter(path, "llama")
        for name, known in reader.fields.items():
            if not name.startswith("GGUF.") and name != gguf.Keys.General.ARCHITECTURE:
                element = known.types[1] if known.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, known.contents(), known.types[0], element)
        wanted = gguf.GGMLQuantizationType[kind]
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if values.ndim < 2:
                writer.add_tensor(tensor.name, values)
            else:
                writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return Format(make)


def recipe(name: str) -> Format:
    """A recipe of `benchmarks.make_quantised`."""
    return Format(lambda sources, folder: write_quantised(sources.dense, folder, RECIPES[name](GROUP)).folder)


def rewritten(tensors: Callable[[Tensor], dict[str, Tensor]], config: dict[str, Any]) -> Format:
    """Matrices of the layers as other tensors, by suffix. config: the checkpoint's `quantization_config`."""

    def make(sources: Sources, folder: Path) -> Path:
        shutil.copytree(sources.dense, folder)
        found: dict[str, Tensor] = {}
        for name, tensor in load_file(sources.dense / "model.safetensors").items():
            parts = tensors(tensor.float()) if name.endswith(QUANTISED) else {"weight": tensor}
            found |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        save_file(found, folder / "model.safetensors")
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
        return folder

    return Format(make)


def floats(weight: Tensor) -> dict[str, Tensor]:
    """e4m3 with a scale for the matrix."""
    scale = weight.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def bytes_by_row(weight: Tensor) -> dict[str, Tensor]:
    """What bitsandbytes stores for 8 bits."""
    most = weight.abs().amax(1)
    return {"weight": (weight * (127 / most)[:, None]).round().to(torch.int8), "SCB": most}


def online(name: str) -> Format:
    """Quantised while it is loaded."""
    return Format(lambda sources, _: sources.dense, {"quantization": name})


GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_0", "MXFP4")
FORMATS: dict[str, Format] = {
    "bfloat16": Format(lambda sources, _: sources.dense),
    "gguf Q4_1": Format(lambda sources, _: sources.gguf),
    **{f"gguf {kind}": as_gguf(kind) for kind in GGUF_TYPES},
    **{name: recipe(name) for name in ("awq", "gptq", "gptq-8", "gptq-act-order", "w4a16", "w8a16", "w8a8")},
    "fp8": rewritten(floats, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "bitsandbytes int8": rewritten(bytes_by_row, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    **{f"--quantization {name}": online(name) for name in ONLINE if name != "experts_int8"},
}


@dataclass(frozen=True)
class Result:
    """What a model says of a text: hidden states [contexts, CONTEXT, H], logits [contexts, CONTEXT, V]."""

    hidden: Tensor
    logits: Tensor

    def perplexity(self, tokens: Tensor) -> float:
        """Of tokens int64 [contexts, CONTEXT]."""
        return math.exp(functional.cross_entropy(self.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def text(path: Path) -> Tensor:
    """The tokens int64 [contexts, CONTEXT] of the text, by the tokenizer of a GGUF file."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json(read_gguf(path)))
    return torch.tensor([tokenizer.encode(topics[name]).ids[:CONTEXT] for name in TEXTS])


def worker_config(path: Path, form: Format, dtype: str) -> WorkerConfig:
    """The options of a worker that serves a format."""
    return WorkerConfig(str(path), dtype=dtype, max_model_len=CONTEXT, device="cpu", **form.options)


def expected(config: WorkerConfig, tokens: Tensor) -> Result:
    """By transformers, on the dequantised weights, in float32."""
    settings = load_config(config)
    weights = build_module(config, settings, torch.float32, CpuDevice())
    tabulate_rotary(weights.causal, CONTEXT)
    with weights.streamed():
        out = weights.causal(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return Result(out.hidden_states[-1].clone(), out.logits)


def served(config: WorkerConfig, tokens: Tensor) -> Result:
    """By the engine's model, each context as a request of its own."""
    device = CpuDevice()
    model = load_model(config, Phases(lambda *_: None), device, SingleRank()).model
    results = [run(model, row, device) for row in tokens]
    return Result(*(torch.stack(same).float() for same in zip(*results, strict=True)))


def run(model: Model, row: Tensor, device: CpuDevice) -> tuple[Tensor, Tensor]:
    """Hidden states [n, H] and logits [n, V] of one request in one step."""
    blocks, count = -(-len(row) // BLOCK), len(row)
    recorder = DryRunRecorder(blocks, BLOCK, device)
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        max_query_len=count,
        max_seq_len=count,
    )
    hidden = model.hidden_states(row, recorder.step(batch, torch.arange(count)))
    return hidden, model.logits(hidden)


def measure(forms: dict[str, Format], path: Path, dtype: str) -> Iterator[tuple[str, list[float]]]:
    """Of each format: relative difference of hidden states, share of equal tokens, both perplexities."""
    tokens = text(path)
    with tempfile.TemporaryDirectory() as folder:
        sources = Sources(path, dense_folder(path, Path(folder) / "dense"))
        for index, (name, form) in enumerate(forms.items()):
            place = Path(folder) / str(index)
            config = partial(worker_config, form.make(sources, place), form)
            exact, found = expected(config("float32"), tokens), served(config(dtype), tokens)
            difference = float((found.hidden - exact.hidden).norm() / exact.hidden.norm())
            same = float((found.logits.argmax(-1) == exact.logits.argmax(-1)).float().mean())
            yield name, [difference, same, exact.perplexity(tokens), found.perplexity(tokens)]


def dense_folder(path: Path, folder: Path) -> Path:
    """A folder with the weights of a GGUF file in bfloat16."""
    config = WorkerConfig(str(path), dtype="bfloat16", device="cpu")
    settings = load_config(config)
    weights = build_module(config, settings, torch.bfloat16, CpuDevice())
    weights.fill(weights.causal)
    weights.causal.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json(read_gguf(path)))
    return folder


def main() -> None:
    """Measure, and print a row for each format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the engine")
    options = parser.parse_args()
    if unknown := set(options.formats) - FORMATS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FORMATS)}")
    chosen = {name: form for name, form in FORMATS.items() if not options.formats or name in options.formats}
    print(f"{processor()}; {options.dtype}, {len(TEXTS) * CONTEXT:,} tokens")
    print(f"{'format':28}{'hidden state':>14}{'same token':>12}{'perplexity':>12}{'exact':>10}{'s':>6}")
    torch.set_grad_enabled(False)
    begin = time.monotonic()
    for name, (difference, same, exact, own) in measure(chosen, options.model, options.dtype):
        took, begin = time.monotonic() - begin, time.monotonic()
        print(f"{name:28}{difference:14.2%}{same:12.1%}{own:12.2f}{exact:10.2f}{took:6.0f}", flush=True)


if __name__ == "__main__":
    main()
