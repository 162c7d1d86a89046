"""Before a model serves, it is proven: the paged path gives the logits of the module as it came.

The dry run has two requests, one in two chunks, and is compared with transformers' own attention on the original
weights. What cannot be served (other layer types, ignored settings, biases of its own) is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.attention import AttentionBatch
from pagewire.workers.attention import KVShape, Trace
from pagewire.workers.errors import LoadError
from pagewire.workers.fuse import tolerance
from pagewire.workers.model import Model, first_line

BLOCK = 8
LENGTHS = (20, 9)
CHUNKS = ((12, 0), (5, 9), (3, 0))  # tokens of each request in each of the steps
SERVED_LAYERS = {"full_attention", "sliding_attention", "attention"}


def refuse(config: Any, reason: str) -> LoadError:
    """The error for an architecture that is not served."""
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    return LoadError(f"{name} is not supported: {reason}")


def check_config(config: Any) -> None:
    """Refuse what the configuration already tells.

    Raises:
        LoadError: an encoder-decoder, or layers that are not attention over a KV cache.
    """
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(config, "it is an encoder-decoder model")
    other = set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS
    if other:
        raise refuse(config, f"it has layers of type {', '.join(sorted(map(str, other)))}")


def dummy_tokens(vocab_size: int) -> list[Tensor]:
    """Token ids int64 [n] of the dry run's requests."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in LENGTHS]


def reference_logits(causal: Any, tokens: list[Tensor]) -> list[Tensor]:
    """Logits [n, V] by the module as it came, one request at a time.

    Raises:
        LoadError: it cannot run.
    """
    try:
        return [causal(input_ids=ids[None], use_cache=False).logits[0] for ids in tokens]
    except Exception as error:
        raise refuse(causal.config, f"its forward pass fails: {first_line(error)}") from error


def paged_logits(model: Model, tokens: list[Tensor], trace: Trace) -> list[Tensor]:
    """The same over a paged cache, in chunks and together."""
    done = [0] * len(tokens)
    parts: list[list[Tensor]] = [[] for _ in tokens]
    for lengths in CHUNKS:
        ids = [t[d : d + n] for t, d, n in zip(tokens, done, lengths, strict=True)]
        positions = [torch.arange(d, d + n) for d, n in zip(done, lengths, strict=True)]
        batch = dry_batch(positions, [d + n for d, n in zip(done, lengths, strict=True)])
        hidden = model.hidden_states(torch.cat(ids), torch.cat(positions), trace.step(batch))
        logits = model.logits(hidden)
        for part, rows in zip(parts, logits.split(list(lengths)), strict=True):
            part.append(rows)
        done = [d + n for d, n in zip(done, lengths, strict=True)]
    return [torch.cat(part) for part in parts]


def dry_batch(positions: list[Tensor], seq_lens: list[int]) -> AttentionBatch:
    """Requests of up to 3 blocks each, whose blocks interleave."""
    num_requests = len(positions)
    lengths = torch.tensor([len(p) for p in positions])
    table = torch.arange(3 * num_requests, dtype=torch.int32).view(3, num_requests).T.contiguous()
    slots = [table[r][p // BLOCK].long() * BLOCK + p % BLOCK for r, p in enumerate(positions)]
    return AttentionBatch(
        query_start_loc=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
        max_query_len=int(lengths.max()),
        max_seq_len=max(seq_lens),
    )


def prove(model: Model, tokens: list[Tensor], wanted: list[Tensor]) -> list[KVShape]:
    """Run the paged path and compare. Returns the KV cache's shape of each layer.

    Raises:
        LoadError: the architecture cannot be served, and why.
    """
    trace = Trace(num_blocks=3 * len(tokens), block_size=BLOCK)
    config = model.config
    try:
        found = paged_logits(model, tokens, trace)
    except Exception as error:
        raise refuse(config, f"paged attention does not fit it: {first_line(error)}") from error
    check_calls(config, trace)
    check_windows(config, trace)
    if (difference := relative_difference(found, wanted)) > tolerance(wanted[0].dtype):
        raise refuse(config, f"its logits with paged attention are wrong (by {difference:.1%} of the largest)")
    return [trace.shapes[layer] for layer in range(len(trace.shapes))]


def check_calls(config: Any, trace: Trace) -> None:
    """Every decoder layer attended once per step.

    Raises:
        LoadError: otherwise.
    """
    num_layers = config.get_text_config().num_hidden_layers
    expected = dict.fromkeys(range(num_layers), len(CHUNKS))
    if not trace.num_calls:
        raise refuse(config, "it does not let its attention be replaced")
    if dict(sorted(trace.num_calls.items())) != expected:
        attending = len(trace.num_calls)
        raise refuse(config, f"{attending} of its {num_layers} layers call attention exactly once")


def check_windows(config: Any, trace: Trace) -> None:
    """Layers that the configuration calls sliding told attention of their window: the dry run is too short to see.

    Raises:
        LoadError: otherwise.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    for layer in trace.shapes:
        sliding = kinds[layer] == "sliding_attention" if kinds else bool(window)
        if sliding and trace.windows[layer] is None and window is not None:
            raise refuse(config, f"layer {layer} does not hand its sliding window to attention")


def relative_difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest wanted value."""
    pairs = list(zip(found, wanted, strict=True))
    largest = max(float(b.float().abs().max()) for _, b in pairs)
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
    return worst / max(largest, 1e-6) if worst == worst else float("inf")
