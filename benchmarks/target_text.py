"""Text for drafters to be trained on, as the model sees it: its own, and that of Python's documentation.

Each line begins with documentation. In three of four batches the model goes on greedily from there, as it does when
drafts are wanted; in the others the documentation goes on. The engine generates, which is much faster than
transformers; transformers then reads all of it, for the states after some layers, and the final ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.train_demo import read_corpus
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.process.wiring import open_runner
from tests.workers.driver import GREEDY, Driver

HELD_OUT = 20  # of this many documents one is kept for the measurement
NUM_PROMPT_TOKENS = 48
LENGTH = 192
ROWS, ROWS_AT_ONCE = 64, 8  # that are generated at the same time, and read


class Lines(NamedTuple):
    """Lines of text. token_ids: int64 [N, T]. states: [N, T, places * H] side by side. final: [N, T, H], normed."""

    token_ids: Tensor
    states: Tensor
    final: Tensor

    def take(self, index: Sequence[int]) -> Lines:
        """Some of them."""
        return Lines(*(part[list(index)] for part in self))


def texts(held_out: bool) -> list[str]:
    """Documents to train on, or those that were left out."""
    return [text for i, text in enumerate(read_corpus().documents) if (i % HELD_OUT == 0) == held_out]


class Author:
    """Generates text greedily, with the engine's own worker in this process."""

    def __init__(self, model: Path, num_threads: int) -> None:
        config = WorkerConfig(
            str(model),
            max_model_len=2 * LENGTH,
            max_num_seqs=ROWS,
            num_blocks=ROWS * LENGTH // 16,
            num_threads=num_threads,
        )
        self._runner, _ = open_runner(config, lambda *_: None)

    def go_on(self, prompts: Tensor) -> Tensor:
        """Lines int64 [N, LENGTH - 1] that begin with prompts, past any end of sequence."""
        count = LENGTH - 1 - prompts.shape[1]
        made = Driver(self._runner, budget=2048).generate(prompts.tolist(), count, GREEDY)
        return torch.cat([prompts, torch.tensor(made)], 1)


def collect(model: Any, author: Author, tokenizer: Path, places: Sequence[int], seconds: float) -> Lines:
    """As many lines as are made in some seconds of processor time. model: transformers'."""
    encode = Tokenizer.from_file(str(tokenizer)).encode
    documents = [ids for text in texts(held_out=False) if len(ids := encode(text).ids) >= NUM_PROMPT_TOKENS]
    random.Random(0).shuffle(documents)
    beginnings, pieces = _beginnings(documents), _pieces(documents)
    parts, begin = list[Lines](), time.process_time()
    while time.process_time() - begin < seconds:
        lines = next(pieces) if len(parts) % 4 == 3 else author.go_on(next(beginnings))
        parts.append(read(model, lines, places))
        count = sum(part.token_ids.numel() for part in parts)
        print(f"{count:,} tokens of text, {count / (time.process_time() - begin):,.0f} a second", flush=True)
    return Lines(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _beginnings(documents: Sequence[list[int]]) -> Iterator[Tensor]:
    """Batches of the first tokens of documents, int64 [N, NUM_PROMPT_TOKENS], again and again."""
    while True:
        for first in range(0, len(documents) - ROWS, ROWS):
            yield torch.tensor([ids[:NUM_PROMPT_TOKENS] for ids in documents[first : first + ROWS]])


def _pieces(documents: Sequence[list[int]]) -> Iterator[Tensor]:
    """Batches of pieces of documentation, int64 [N, LENGTH - 1], from random places."""
    stream, rng = torch.tensor([i for ids in documents for i in ids]), random.Random(1)
    while True:
        starts = [rng.randrange(len(stream) - LENGTH) for _ in range(ROWS)]
        yield torch.stack([stream[start : start + LENGTH - 1] for start in starts])


@torch.no_grad()
def read(model: Any, token_ids: Tensor, places: Sequence[int]) -> Lines:
    """Lines of text int64 [N, T] with what transformers' model computes of them."""
    layers = list[list[Tensor]]()
    for rows in token_ids.split(ROWS_AT_ONCE):
        found = model.model(input_ids=rows, use_cache=False, output_hidden_states=True).hidden_states
        layers.append([found[place].bfloat16() for place in (*places, -1)])
    *states, final = (torch.cat(each) for each in zip(*layers, strict=True))
    return Lines(token_ids, torch.cat(states, -1), final)
