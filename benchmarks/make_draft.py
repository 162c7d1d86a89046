"""Make a drafter for a language model: train for minutes what says what the model is going to say.

    python -m benchmarks.make_draft MODEL OUT [--method eagle3] [--minutes 12]
    python -m benchmarks.make_draft MODEL OUT --method draft_model [--keep 10]

MODEL is a Llama: a folder, or a GGUF file such as SmolLM2's (`make build/smollm2`), whose weights OUT/model gets in
bfloat16. OUT/draft gets the drafter:

- "eagle3": one layer that continues from states within the model (`eagle_head.py`), with a small vocabulary: a
  draft costs a tenth of a token of the model, or less
- "draft_model": some of the model's layers, the first, the last and others evenly between, with its embedding and
  output layer. In a model as small as SmolLM2-135M a fifth of all weights is the output layer, so a third of the
  layers costs nearly half of a token of the model

Both learn the model's probabilities (Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015)
on text that the model has made itself, and on Python's own documentation (`target_text.py`). Minutes are of
processor time, so others on the machine make it later, not worse. How many drafts count, position by position, is
measured on lines of the model that were not trained on; `benchmarks.draft_speed` measures what they are worth.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.accuracy import dense_folder
from benchmarks.eagle_head import EagleHead
from benchmarks.target_text import NUM_PROMPT_TOKENS, Author, Lines, collect, read, texts
from benchmarks.train_demo import learning_rate
from pagewire.ipc.gguf.file import is_gguf

ROWS_OF_A_STEP = 4
COLLECTING = 0.5  # of the time: making text
PEAK = 1e-3
DEPTHS = ((0.4, 1), (0.7, 2), (1.0, 3))  # of an EAGLE-3 head's training: until this share of it, how deep
DEPTH_WEIGHT = 0.7  # of each depth beside the one before
NUM_MEASURED, NUM_HELD_OUT = 3, 32  # drafts in a row that are measured, on this many lines

Loss = Callable[[Lines, float], Tensor]
"""The loss of a batch, at a share of the training."""


def kept_layers(num_layers: int, count: int) -> list[int]:
    """Which layers a draft model has: the first, the last, and others evenly between."""
    return sorted({round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)})


def cut_down(model: Any, count: int) -> Any:
    """A copy of a model with `count` of its layers; embedding and output layer are not to be trained."""
    draft = copy.deepcopy(model).float()
    kept = kept_layers(len(draft.model.layers), count)
    draft.model.layers = nn.ModuleList(draft.model.layers[i] for i in kept)
    for index, layer in enumerate(draft.model.layers):
        layer.self_attn.layer_idx = index
    draft.config.num_hidden_layers = len(kept)
    draft.requires_grad_(True)
    for part in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        part.requires_grad_(False)
    return draft.train()


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean over places, in nats, of logits [..., V] against the probabilities of other ones."""
    return -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def loss_of_layers(draft: Any, batch: Lines) -> Tensor:
    """Of a draft model's next tokens."""
    head = draft.get_output_embeddings().weight.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        logits = draft(input_ids=batch.token_ids, use_cache=False).logits
    return cross_entropy(logits.float(), functional.linear(batch.final, head).float())


def loss_of_head(head: EagleHead, batch: Lines, depth: int) -> Tensor:
    """Of the tokens that an EAGLE-3 head drafts, one behind another."""
    with torch.no_grad():
        wanted = head.wanted(batch.final)
    with torch.autocast("cpu", torch.bfloat16):
        each = head(batch.states, batch.token_ids, depth)
    losses = [cross_entropy(logits, wanted[:, 1 + j :]) for j, logits in enumerate(each)]
    return torch.stack([loss * DEPTH_WEIGHT**j for j, loss in enumerate(losses)]).sum()


def train(drafter: Any, loss_of: Loss, lines: Lines, seconds: float, save: Callable[[], object]) -> None:
    """Train a drafter on lines in random batches, and save it every hundred steps. seconds: of processor time."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=PEAK, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    rng, begin, step, smooth = random.Random(0), time.process_time(), 0, 0.0
    while (share := (time.process_time() - begin) / seconds) < 1:
        batch = lines.take(rng.sample(range(len(lines.token_ids)), ROWS_OF_A_STEP))
        loss = loss_of(batch, share)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(share, PEAK)
        optimizer.step()
        step += 1
        smooth = loss.item() if step == 1 else 0.95 * smooth + 0.05 * loss.item()
        if step % 20 == 0:
            rate = step * batch.token_ids.numel() / (time.process_time() - begin)
            print(f"{share:.0%}, step {step}  loss {smooth:.3f}  {rate:,.0f} tokens/s", flush=True)
        if step % 100 == 0:
            save()
    save()


@torch.inference_mode()
def counts(drafts: Tensor, lines: Lines) -> list[float]:
    """The share of drafts that count at each position, if all before it count.

    drafts: int64 [N, T - 2, positions]; the first of place t is for the token at t + 2.
    """
    alive = torch.ones(drafts.shape[:2], dtype=torch.bool)
    alive[:, : NUM_PROMPT_TOKENS - 2] = False
    shares = []
    for j in range(drafts.shape[2]):
        alive = alive[:, : lines.token_ids.shape[1] - 2 - j]
        right = drafts[:, : alive.shape[1], j] == lines.token_ids[:, 2 + j :]
        shares.append(float((right & alive).sum() / alive.sum().clamp_min(1)))
        alive = right & alive
    return shares


@torch.inference_mode()
def drafts_of_head(head: EagleHead, lines: Lines) -> Tensor:
    """What a head drafts after tokens that are right."""
    with torch.autocast("cpu", torch.bfloat16):
        each = head(lines.states, lines.token_ids, NUM_MEASURED)
    length = lines.token_ids.shape[1] - 2
    ids = [head.target_ids[logits[:, :length].argmax(-1)] for logits in each]
    return torch.stack([functional.pad(part, (0, length - part.shape[1]), value=-1) for part in ids], -1)


@torch.inference_mode()
def drafts_of_layers(draft: Any, lines: Lines) -> Tensor:
    """What a draft model drafts after tokens that are right: it draws each of them from the tokens before."""
    with torch.autocast("cpu", torch.bfloat16):
        ids = draft(input_ids=lines.token_ids, use_cache=False).logits.argmax(-1)
    length = lines.token_ids.shape[1] - 2
    each = [ids[:, 1 + j : 1 + j + length] for j in range(NUM_MEASURED)]
    return torch.stack([functional.pad(part, (0, length - part.shape[1]), value=-1) for part in each], -1)


def frequent_tokens(lines: Lines, count: int) -> Tensor:
    """The tokens that the model says most often, in ascending order."""
    found, times = lines.token_ids.unique(return_counts=True)
    order = times.argsort(descending=True)[:count]
    share = times[order].sum() / times.sum()
    print(f"{len(order):,} tokens can be drafted, {share:.1%} of the text", flush=True)
    return found[order].sort().values


def held_out_prompts(tokenizer: Path) -> Tensor:
    """Beginnings of documents that are not trained on, int64 [n, NUM_PROMPT_TOKENS]."""
    encode = Tokenizer.from_file(str(tokenizer)).encode
    each = [ids for text in texts(held_out=True) if len(ids := encode(text).ids) >= NUM_PROMPT_TOKENS]
    return torch.tensor([ids[:NUM_PROMPT_TOKENS] for ids in each[-NUM_HELD_OUT:]])


def make(options: argparse.Namespace, folder: Path, model: Any) -> None:
    """Train a drafter of the model in a folder, and say how many of its drafts count."""
    num_layers, tokenizer = len(model.model.layers), folder / "tokenizer.json"
    places = [num_layers // 3, 2 * num_layers // 3, num_layers - 1] if options.method == "eagle3" else [0]
    seconds = 60 * options.minutes
    author = Author(options.model, options.threads)
    lines = collect(model, author, tokenizer, places, COLLECTING * seconds)
    measured = read(model, author.go_on(held_out_prompts(tokenizer)), places)
    rest = (1 - COLLECTING) * seconds
    if options.method == "eagle3":
        head = EagleHead(model, places, frequent_tokens(lines, options.vocabulary), options.out / "draft")

        def loss_at(batch: Lines, share: float) -> Tensor:
            return loss_of_head(head, batch, next(depth for end, depth in DEPTHS if share < end))

        train(head, loss_at, lines, rest, lambda: head.save(tokenizer))
        drafts = drafts_of_head(head, measured)
    else:
        draft = cut_down(model, options.keep or -(-num_layers // 3))

        def save() -> None:
            copy.deepcopy(draft).to(torch.bfloat16).save_pretrained(options.out / "draft")
            shutil.copy(tokenizer, options.out / "draft")

        train(draft, lambda batch, share: loss_of_layers(draft, batch), lines, rest, save)
        drafts = drafts_of_layers(draft, measured)
    shares = ", ".join(f"{share:.0%}" for share in counts(drafts, measured))
    print(f"drafts that count, each if all before it do: {shares}")


def main() -> None:
    """Train and write it."""
    parser = argparse.ArgumentParser(description="Make a drafter for a language model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", choices=("eagle3", "draft_model"), default="eagle3")
    parser.add_argument("--keep", type=int, help="layers that a draft model keeps; default: a third")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that an EAGLE-3 head can draft")
    parser.add_argument("--minutes", type=float, default=12.0, help="of processor time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    is_file = is_gguf(options.model)
    folder = dense_folder(options.model, options.out / "model") if is_file else options.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
    make(options, folder, model)


if __name__ == "__main__":
    main()
