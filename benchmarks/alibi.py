"""A model with ALiBi, trained in minutes: its perplexity by the worker, beside that by transformers.

    python -m benchmarks.alibi --minutes 4

A small BLOOM, whose heads are no power of 2 so that there are slopes of both kinds, is trained as the demo
model is, on contexts of 512 tokens. Held-out text is then read in contexts of 512 and of 1,024 tokens, in
float32: by transformers at once, and by the worker in chunks, batched, with its keys in a paged cache. Status
1: the perplexities differ by over 0.1%.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, PreTrainedModel

from benchmarks import train_demo
from benchmarks.limits import processor
from pagewire.ipc.wire.params import SamplingParams
from tests.workers.driver import Driver, load_runner, values

LENGTHS = (512, 1024)
NUM_CONTEXTS = 6  # of each length
MOST = 1e-3  # the difference of perplexities that is permitted
CHUNK = 160  # tokens of a step: no multiple of a context, nor of a KV tile
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def make_model(tokenizer: train_demo.PreTrainedTokenizerFast) -> BloomForCausalLM:
    """A BLOOM of the demo model's size, without weights that mean anything."""
    config = BloomConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        n_layer=4,
        n_head=6,
        pad_token_id=train_demo.PAD,
        bos_token_id=train_demo.BOS,
        eos_token_id=train_demo.EOS,
    )
    return BloomForCausalLM(config)


@torch.no_grad()
def by_transformers(folder: Path, contexts: Tensor) -> float:
    """The perplexity of contexts int64 [n, length]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in contexts])
    return math.exp(functional.cross_entropy(logits[:, :-1].flatten(0, 1), contexts[:, 1:].flatten()))


def by_worker(folder: Path, contexts: Tensor) -> float:
    """The same by the worker, in chunks."""
    length = contexts.shape[1] + 1
    runner, _ = load_runner(
        folder, max_model_len=length, block_size=16, num_blocks=NUM_CONTEXTS * (length // 16 + 1)
    )
    requests = Driver(runner, budget=CHUNK).run(contexts.tolist(), 1, SCORED)
    scores = [score for request in requests for part in request.prompt_logprobs for score in values(part)[1]]
    if len(scores) != contexts.numel() - len(contexts):
        raise RuntimeError(f"{len(scores)} log probabilities for {contexts.numel()} tokens")
    return math.exp(-sum(scores) / len(scores))


def print_perplexities(model: PreTrainedModel, held_out: Tensor) -> float:
    """A line for each length of contexts of held-out tokens int64 [n]; returns the greatest relative difference."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        for length in LENGTHS:
            contexts = held_out[: NUM_CONTEXTS * length].view(NUM_CONTEXTS, length)
            theirs, ours = by_transformers(folder, contexts), by_worker(folder, contexts)
            worst = max(worst, abs(ours / theirs - 1))
            print(
                f"contexts of {length}: transformers {theirs:.5f}, worker {ours:.5f} ({ours / theirs - 1:+.1e})"
            )
    return worst


def main() -> int:
    """Train, and print both perplexities for each length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=4.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    corpus = train_demo.read_corpus()
    tokenizer = train_demo.train_tokenizer(corpus)
    model = make_model(tokenizer)
    report = train_demo.train(model, corpus, tokenizer, options.minutes)
    print(f"{processor()}; {report}")
    held_out = train_demo.token_stream(train_demo.held_out(corpus), tokenizer, random.Random(0))
    return 1 if print_perplexities(model, held_out) > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
