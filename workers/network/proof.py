"""Proves at load that the transformed model computes the logits of the original module.

The dry run has two requests, one of them in two chunks; its logits are compared with those of transformers' own
attention and the original weights. In a group of several ranks, rank 0 computes these for all; every rank compares
the logits that the group has computed, and a model is right only if all ranks find it so.

Models that cannot be supported (other layer types, ignored settings, attention biases) are refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagewire.kernels.data.floats import Floats
from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.paging import AttentionBatch
from pagewire.kernels.data.states import StateBatch
from pagewire.kernels.data.weight import Scheme
from pagewire.workers.caches.kv import KVShape
from pagewire.workers.caches.sources import SourceBatch
from pagewire.workers.caches.states import StateShape
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import DisprovenError, LoadError, first_line
from pagewire.workers.module.configuration import (
    ATTENTION_LAYERS,
    FEED_FORWARD_LAYERS,
    STATE_LAYERS,
    layer_windows,
    num_decoder_layers,
)
from pagewire.workers.module.refusals import refuse
from pagewire.workers.module.text_base import picture_layers
from pagewire.workers.module.transforms import tolerance
from pagewire.workers.network.model import Model
from pagewire.workers.network.module_base import ModuleScores
from pagewire.workers.network.pooling_spec import PoolingSpec
from pagewire.workers.network.reference import BLOCK, LENGTHS, DryRun, Expected
from pagewire.workers.ranks.interface import Collective
from pagewire.workers.step.recorder import AttentionCalls, DryRunRecorder
from pagewire.workers.versions import INDEXED_KINDS, wrong_arithmetic

logger = logging.getLogger("pagewire.worker")

REQUEST_FACTOR = 3  # in a request of a few tokens, one that goes to other experts weighs as much more
ROUNDED = 0.15  # permitted difference of logits where activations are rounded
ECHO_FACTOR = 4  # rounding in every layer, beside half a unit in the embeddings alone
MOST_ROUNDED = 0.5  # permitted difference, however much rounding a model magnifies
INDEXED = {"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text"}
"""Model types whose indexers are served (`kernels/indexed.py`)."""
COMPRESSED = "and a KV cache of keys that stand for windows of tokens is not served"
NUM_STATES = 2 * len(LENGTHS)
"""State slots of a dry run: a request reads one of its two, and writes the other."""
NOT_REPLACED = "it does not let its attention be replaced"
RECURRENT = {"rwkv", "xlstm"}
"""Recurrent models whose modules do not let their states be replaced."""
RELATIVE = {"inkling_text", "inkling2_text"}
"""Models with layers of a type that is served, whose attention is not."""
BOTH_WAYS = (True, "all")
"""Values of `use_bidirectional_attention` with which all tokens of a prompt attend to each other.

Transformers' eager attention, with which models are proven, does not heed it in all of them, so that their logits
would not show it.
"""
PLACED_DECODERS = {"whisper"}
"""Encoder-decoders whose decoder takes the positions of its tokens. The others count them by their own cache."""


class MemoryShapes(NamedTuple):
    """The shapes of what a model's layers keep of a sequence."""

    kv: list[KVShape]
    """Of each layer."""
    states: list[StateShape]
    """Of each state, in the order in which layers ask for them; empty if they keep none."""


def check_config(config: Any) -> None:
    """Refuse a model that its configuration shows to be unsupported.

    Raises:
        LoadError: an encoder-decoder or a half of one, or layers that are neither attention over a KV cache nor
            recurrent.
    """
    text = config.get_text_config()
    if not hasattr(text, "num_hidden_layers"):
        raise refuse(config, "its configuration describes no layers of a language model")
    if getattr(config, "is_encoder_decoder", False):
        return  # `seq2seq.lengths` says which are served
    if getattr(type(config), "is_encoder_decoder", False) and config.model_type not in PLACED_DECODERS:
        raise refuse(
            config, "it is the decoder of an encoder-decoder model, which counts positions by its own cache"
        )
    if text.model_type in RECURRENT:
        raise refuse(
            config, "it is a recurrent model that keeps its states itself; transformers' generate runs it"
        )
    if text.model_type in RELATIVE:
        raise refuse(
            config,
            "its attention adds logits of a query's own by distance, which the kernels do not have; transformers' "
            "generate runs it",
        )
    if getattr(text, "use_bidirectional_attention", None) in BOTH_WAYS:
        raise refuse(
            config,
            "all tokens of its prompts attend both ways, text as well (use_bidirectional_attention), so that keys "
            "would depend on what follows; transformers' generate runs it",
        )
    if (reason := wrong_arithmetic(text)) is not None:
        raise refuse(config, reason)
    if text.model_type == "doge" and text.is_moe:
        raise refuse(
            config, "its choice of experts mixes the tokens that run together; transformers' generate runs it"
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    if getattr(text, "index_topk", None) is not None:  # some name no kinds
        kinds |= INDEXED_KINDS
    served = ATTENTION_LAYERS | STATE_LAYERS | FEED_FORWARD_LAYERS
    other = kinds - served - (INDEXED_KINDS if text.model_type in INDEXED else set())
    if other:
        words = f"it has layers of type {', '.join(sorted(map(str, other)))}"
        raise refuse(
            config, words + (f", {COMPRESSED}" if any("compressed" in str(k) for k in other) else "")
        )


def results(model: Model, run: DryRun, recorder: DryRunRecorder) -> list[Tensor]:
    """Logits [n, V] of each request on a paged cache, with the requests batched and chunked.

    Hidden states [n, H], if the model pools. Empty in a stage before the last, which takes its part in the same
    steps.
    """
    done = [0] * len(run.token_ids)
    slots = [-1] * len(run.token_ids)
    parts: list[list[Tensor]] = [[] for _ in run.token_ids]
    for lengths in run.chunks:
        places = [torch.arange(d, d + n) for d, n in zip(done, lengths, strict=True)]
        done = [d + n for d, n in zip(done, lengths, strict=True)]
        ids = torch.cat([t[p] for t, p in zip(run.token_ids, places, strict=True)])
        positions = torch.cat([run.rows(i, p) for i, p in enumerate(places)])
        batch = model.laid_out(dry_batch(places, done, run.num_blocks), positions)
        starts = batch.query_start_loc[:-1].tolist()
        states = dry_states(lengths, slots)
        of_states = (states.row_starts, states.spans)
        sources = SourceBatch.of(batch, run.sources, BLOCK) if run.sources else None
        of_sources = [] if sources is None else sources.tensors
        uploaded = recorder.device.upload([ids, positions, *batch.tensors, *of_states, *of_sources])
        ids, positions, *of_batch = uploaded
        batch = batch.with_tensors(of_batch[:4])
        sources = None if sources is None else sources.with_tensors(of_batch[6:])
        step = recorder.step(batch, positions, starts, StateBatch(*of_batch[4:6]), sources)
        step.received = model.received(len(ids))
        hidden = model.hidden_states(ids, step)
        if not model.is_last:
            continue
        rows = (hidden if model.head is None else model.logits(hidden)).cpu()
        for part, own in zip(parts, torch.split(rows, list(lengths)), strict=True):
            part.append(own)
    whole = [torch.cat(part) for part in parts if part]
    return [rows[run.first_target :] for rows in whole] if run.sources else whole


def dry_batch(places: list[Tensor], seq_lens: list[int], num_blocks: int = 3) -> AttentionBatch:
    """A batch of requests with interleaved KV blocks. places: each request's tokens, as indices into it."""
    num_requests = len(places)
    lengths = torch.tensor([len(p) for p in places])
    table = torch.arange(num_blocks * num_requests, dtype=torch.int32).view(num_blocks, num_requests)
    table = table.T.contiguous()
    kv_slots = [table[r][p // BLOCK].long() * BLOCK + p % BLOCK for r, p in enumerate(places)]
    return AttentionBatch(
        query_start_loc=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(kv_slots),
        max_query_len=int(lengths.max()),
        max_seq_len=max(seq_lens),
    )


def dry_states(lengths: Sequence[int], slots: list[int]) -> StateBatch:
    """The state slots of a step of these numbers of tokens.

    A row of several tokens keeps the states in its middle, too, in the slot that it writes again at its end.

    slots: that each request reads; changed to those that it reads in the next step.
    """
    starts, spans, first = [0], list[list[int]](), 0
    for request, length in enumerate(lengths):
        read, written = slots[request], 2 * request + (slots[request] == 2 * request)
        for end in sorted({first + length // 2, first + length} - {first}):
            spans.append([first, end, read, written])
            first, read = end, written
        slots[request] = read
        starts.append(len(spans))
    return StateBatch(torch.tensor(starts, dtype=torch.int32), torch.tensor(spans, dtype=torch.int32))


def prove(
    model: Model,
    config: Any,
    run: DryRun,
    expected: Sequence[Tensor],
    permitted: float,
    max_model_len: int,
    device: Device,
    collective: Collective,
) -> MemoryShapes:
    """Run the transformed model and compare its logits, or its hidden states if it pools.

    Returns the shapes of what its layers keep; there are none if the model encodes.

    expected: of the original module, with dequantised weights. permitted: see `permitted_difference`.

    Raises:
        LoadError: the architecture is not supported; the text says why. If all ranks of the group raise it, it is a
            `DisprovenError`.
    """
    recorder = DryRunRecorder(run.num_blocks * len(LENGTHS), BLOCK, device, NUM_STATES)
    attends = "packed prompts do" if model.encodes else "paged attention does"
    try:
        actual = results(model, run, recorder)
    except LoadError as error:
        raise refuse(config, str(error)) from error
    except Exception as error:
        raise refuse(config, f"{attends} not fit it: {first_line(error)}") from error
    if not model.encodes:
        check_calls(config, recorder.calls, None if model.stage is None else model.stage.layers)
        check_windows(config, recorder.calls, max_model_len)
    difference = worst_difference(actual, expected) if actual else 0.0
    wrong = torch.tensor([difference > permitted], dtype=torch.float32)
    # All ranks must come to the same conclusion.
    if collective.all_reduce(wrong.to(device.torch_device)).item():
        by = f"by {difference:.1%}" if actual else "the last stage has them"
        what = "logits with paged attention" if model.head is not None or not actual else "hidden states"
        raise DisprovenError(str(refuse(config, f"its {what} are wrong ({by})")))
    logger.debug("results differ from the original module's by %.2f%%", 100 * difference)
    if model.encodes:
        return MemoryShapes([], [])
    return MemoryShapes(recorder.kv_shapes(model.first_layer), recorder.states.shapes)


def check_scores(
    scores: ModuleScores,
    spec: PoolingSpec,
    expected: Expected,
    permitted: float,
    device: Device,
) -> None:
    """Compare a classifier's logits with those of the untouched module, given its hidden states on the host.

    permitted: see `permitted_difference`.

    Raises:
        LoadError: they differ.
    """
    actual = []
    for states in expected.results:
        if spec.kind != "token_classify":
            pooled = {"LAST": states[-1], "CLS": states[0], "MEAN": states.float().mean(0)}[spec.pooling_type]
            states = pooled.to(states.dtype)[None]
        actual.append(scores(states.to(device.torch_device)).cpu())
    difference = relative_difference(actual, expected.scores)
    if difference > permitted:
        raise refuse(scores.module.config, f"its scores are wrong (by {difference:.1%})")


def permitted_difference(dtype: torch.dtype, schemes: Iterable[Scheme]) -> float:
    """Permitted relative difference of logits of a model in this dtype, if products have weights of these schemes.

    Products with quantised weights round most activations to 8 bits. That costs about 1% in the 30 layers of
    SmolLM2, and before outliers were exempt it cost at most 3% in random models. A wrong order of rows, columns or
    halves of a byte makes over 100%, and so does a zero of 4 bits that is off by 1. Single products are proven more
    sharply (`products.py`).
    """
    return ROUNDED if any(isinstance(scheme, Integers | Floats) for scheme in schemes) else tolerance(dtype)


def permitted_by(expected: Expected, permitted: float) -> float:
    """The permitted difference, or more if a difference in the last bit of the embeddings makes more by itself.

    Random models in bfloat16: Mamba-2 with the sizes of published ones differs by 17% in 24 layers, which is one to
    two echoes; Llama of 8 billion weights by 6% on a GPU, and narrower ones by 0.7 echoes. What is wrong makes over
    100%.
    """
    if not expected.echoes:
        return permitted
    echo = relative_difference(expected.echoes, expected.results)
    return max(permitted, min(ECHO_FACTOR * echo, MOST_ROUNDED))


def attending_layers(config: Any) -> set[int]:
    """The numbers of the decoder layers that attend to text."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["attention"] * num_decoder_layers(config)
    return {layer for layer, kind in enumerate(kinds) if kind in ATTENTION_LAYERS} - picture_layers(config)


def check_calls(config: Any, calls: AttentionCalls, layers: range | None = None) -> None:
    """Check that each of these decoder layers that attends, and no other, called attention once per step.

    layers: None: all.

    Raises:
        LoadError: a layer did not.
    """
    attending = attending_layers(config)
    attending = attending if layers is None else attending & set(layers)
    if attending and not calls.num_calls:
        raise refuse(config, NOT_REPLACED)
    for layer in sorted({*attending, *calls.num_calls} - picture_layers(config)):
        if (num_calls := calls.num_calls.get(layer, 0) / calls.num_steps) != 1:
            raise refuse(config, f"layer {layer} calls attention {num_calls:g} times, not once")


def check_windows(config: Any, calls: AttentionCalls, max_model_len: int) -> None:
    """Check that layers passed their sliding window or chunk to attention; the dry run is too short to show it.

    Raises:
        LoadError: a layer did not, or which keys count depends on their numbers in sequences of `max_model_len`.
    """
    kept = getattr(config.get_text_config(), "keep_window_size", None)
    if kept is not None and kept < max_model_len:
        raise refuse(config, f"it drops keys by their values beyond {kept} tokens; use max_model_len={kept}")
    windows = layer_windows(config)
    for layer in calls.shapes:
        if (window := windows[layer]) is None:
            continue
        name, size = window
        if size < max_model_len and calls.windows[layer] is None:
            raise refuse(config, f"layer {layer} does not hand its {name.replace('_', ' ')} to attention")


def worst_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The relative difference of logits [n, V]: over all requests, or of a request alone if that is much larger.

    Models may compute the requests in different ways, as they are at different positions. Of a request alone,
    tokens count only if their expected logits are numbers.
    """
    worst = relative_difference(actual, expected)
    for a, b in zip(actual, expected, strict=True):
        numbers = b.isfinite().all(1)
        if numbers.any():
            worst = max(worst, relative_difference([a[numbers]], [b[numbers]]) / REQUEST_FACTOR)
    return worst


def relative_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Relative difference of logits [n, V], as the median over tokens.

    The median, because rounding may send single tokens to other experts, while an error in the model affects most
    tokens.
    """
    a, b = torch.cat(list(actual)).float(), torch.cat(list(expected)).float()
    errors = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-6)
    return float(errors.nan_to_num(torch.inf).median())
