"""Embeddings that prompts bring themselves, laid over those of the tokens whose place they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.ipc.wire.worker_messages import Row
from pagewire.workers.step.context import Overlay


def both(brought: Overlay | None, encoded: Overlay | None) -> Overlay | None:
    """The embeddings that rows bring, and those that the encoder has made, on one device."""
    if brought is None or encoded is None:
        return encoded if brought is None else brought
    rows = torch.cat([brought.rows, encoded.rows.float()])
    nothing = torch.zeros_like(brought.rows)
    deep = [torch.cat([nothing, layer.float()]) for layer in encoded.deep]
    return Overlay(torch.cat([brought.places, encoded.places]), rows, deep)


def overlay_of(rows: Sequence[Row], starts: Sequence[int]) -> Overlay | None:
    """The embeddings that a step's rows bring; None if none does. starts: of the rows in the batch."""
    places: list[Tensor] = []
    values: list[Tensor] = []
    for row, start in zip(rows, starts, strict=True):
        for medium in row.media:
            first = start + medium.start - row.start
            places.append(torch.arange(first, first + medium.num_tokens))
            data = torch.frombuffer(bytearray(medium.data.data), dtype=getattr(torch, medium.data.dtype))
            values.append(data.view(medium.data.shape).float())
    return Overlay(torch.cat(places), torch.cat(values)) if places else None


def input_embedding(base: Any) -> nn.Module:
    """The module of a base model that looks tokens up."""
    module: nn.Module = base.get_input_embeddings()
    return module


def embedding_size(base: Any) -> int:
    """The numbers of a token's embedding; 0 if nothing can take its place.

    That is so in a base model that has no module that looks tokens up, and in one whose layers look them up as well
    (Gemma 3n, Gemma 4 E2B).
    """
    try:
        if any(name.endswith("embed_tokens_per_layer") for name, _ in base.named_modules()):
            return 0
        size: Any = input_embedding(base).embedding_dim
    except (AttributeError, NotImplementedError):
        return 0
    return size if isinstance(size, int) else 0


@contextmanager
def laid_over(base: Any, overlay: Overlay | None) -> Iterator[None]:
    """A context in which a base, a network or a module, gets embeddings for the tokens whose place they take.

    The module that looks tokens up is called with all token ids, as ever, and what it returns is changed. So these
    are embeddings as transformers takes them (`inputs_embeds`): a model that scales them behind this module scales
    these, too.

    Raises:
        RuntimeError: the model has not called that module, or more than once.
    """
    if overlay is None:
        yield
        return
    num_calls = 0

    def lay(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return overlay.over(embedded)

    handle = base.words.register_forward_hook(lay)
    try:
        yield
    finally:
        handle.remove()
    if num_calls != 1:
        raise RuntimeError(f"{base.name} calls its input embedding {num_calls} times")
