"""Make a draft model of a language model: a third of its layers, trained for minutes to say what the model says.

    python -m benchmarks.make_draft MODEL OUT [--keep 10] [--minutes 8]

MODEL is a Llama: a folder, or a GGUF file such as SmolLM2's (`make build/smollm2`), whose weights OUT/model gets in
bfloat16. OUT/draft gets the draft model: the embedding and the output layer as they are, and every third
layer, trained on Python's own documentation so that its probabilities come near the model's (Hinton, Vinyals, Dean,
"Distilling the Knowledge in a Neural Network", 2015). `benchmarks.draft_speed` measures what it is worth.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.accuracy import dense_folder
from benchmarks.train_demo import learning_rate, read_corpus
from pagewire.ipc.gguf.file import is_gguf

ROWS, LENGTH = 4, 192
PEAK = 5e-4
HELD_OUT = 20  # of this many documents one is kept for the measurement


def texts(held_out: bool) -> list[str]:
    """Documents to train on, or those that were left out."""
    return [text for i, text in enumerate(read_corpus().documents) if (i % HELD_OUT == 0) == held_out]


def kept_layers(num_layers: int, count: int) -> list[int]:
    """Which layers a draft model has: the first, the last, and others evenly between."""
    return sorted({round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)})


def cut_down(model: Any, count: int) -> Any:
    """A copy of a model with `count` of its layers; embedding and output layer are not to be trained."""
    draft = copy.deepcopy(model)
    kept = kept_layers(len(draft.model.layers), count)
    draft.model.layers = nn.ModuleList(draft.model.layers[i] for i in kept)
    for index, layer in enumerate(draft.model.layers):
        layer.self_attn.layer_idx = index
    draft.config.num_hidden_layers = len(kept)
    for part in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        part.requires_grad_(False)
    return draft


def loss_of(draft: Any, model: Any, batch: Tensor) -> Tensor:
    """Mean divergence of the draft model's next token from the model's, in nats; batch [B, T] of token ids."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = model(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
        logits = draft(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
    return functional.kl_div(
        logits.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
    )


def train(draft: Any, model: Any, stream: Tensor, minutes: float) -> None:
    """Train a draft model on a line of token ids, in random pieces."""
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rng, begin, step, smooth = random.Random(0), time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - begin) / (60 * minutes)) < 1:
        starts = [rng.randrange(len(stream) - LENGTH) for _ in range(ROWS)]
        loss = loss_of(draft, model, torch.stack([stream[start : start + LENGTH] for start in starts]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(share, PEAK)
        optimizer.step()
        step += 1
        smooth = loss.item() if step == 1 else 0.95 * smooth + 0.05 * loss.item()
        if step % 20 == 0:
            rate = step * ROWS * LENGTH / (time.monotonic() - begin)
            print(f"step {step}  divergence {smooth:.3f}  {rate:,.0f} tokens/s", flush=True)


def main() -> None:
    """Train and write it."""
    parser = argparse.ArgumentParser(description="Make a draft model of a language model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--keep", type=int, help="layers to keep; default: a third")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    is_file = is_gguf(options.model)
    folder = dense_folder(options.model, options.out / "model") if is_file else options.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    draft = cut_down(model, options.keep or -(-len(model.model.layers) // 3)).train()
    for layer in draft.model.layers:
        layer.requires_grad_(True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = torch.tensor([i for text in texts(held_out=False) for i in tokenizer.encode(text).ids])
    print(f"{len(draft.model.layers)} of {len(model.model.layers)} layers, {len(stream):,} tokens of text")
    train(draft, model, stream, options.minutes)
    draft.to(torch.bfloat16).save_pretrained(options.out / "draft")
    shutil.copy(folder / "tokenizer.json", options.out / "draft")


if __name__ == "__main__":
    main()
