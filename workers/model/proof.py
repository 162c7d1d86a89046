"""Proves at load that the transformed model computes the logits of the original module.

The dry run has two requests, one of them in two chunks; its logits are compared with those of transformers' own
attention and the original weights. In a group of several ranks, rank 0 computes these for all; every rank compares
the logits that the group has computed, and a model is right only if all ranks find it so.

Models that cannot be supported (other layer types, ignored settings, attention biases) are refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.integers import Integers
from pagewire.kernels.paging import AttentionBatch
from pagewire.kernels.weight import Scheme
from pagewire.workers.collective.interface import Collective
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import DisprovenError, LoadError, first_line
from pagewire.workers.model.attention import AttentionCalls, DryRunRecorder, KVShape
from pagewire.workers.model.layer_configs import layer_configs
from pagewire.workers.model.lockstep import Lockstep
from pagewire.workers.model.model import Model
from pagewire.workers.model.text_base import picture_layers
from pagewire.workers.model.transforms import tolerance
from pagewire.workers.model.weights import Weights

logger = logging.getLogger("pagewire.worker")

BLOCK = 16
LENGTHS = (
    20,
    9,
)  # tokens of each request; the first starts at position 0, the second ends at the last possible position
CHUNKS = ((12, 0), (5, 9), (3, 0))  # tokens of each request in each of the steps
REQUEST_FACTOR = 3  # in a request of a few tokens, one that goes to other experts weighs as much more
ROUNDED = 0.15  # permitted difference of logits where activations are rounded
SERVED_LAYERS = {"full_attention", "sliding_attention", "attention"}


def refuse(config: Any, reason: str) -> LoadError:
    """The error for an unsupported architecture."""
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    return LoadError(f"{name} is not supported: {reason}")


def check_config(config: Any) -> None:
    """Refuse a model that its configuration shows to be unsupported.

    Raises:
        LoadError: an encoder-decoder, or layers that are not attention over a KV cache.
    """
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(config, "it is an encoder-decoder model")
    other = set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS
    if other:
        raise refuse(config, f"it has layers of type {', '.join(sorted(map(str, other)))}")


@dataclass(frozen=True)
class DryRun:
    """The requests of a dry run: token ids int64 [n] of each, and the position of its first token.

    short_length: see `transforms.short_length`.
    """

    token_ids: list[Tensor]
    offsets: list[int]
    short_length: int = 0

    @property
    def end(self) -> int:
        """The first position after all requests."""
        return max(map(self._end, range(len(self.offsets))))

    def _end(self, index: int) -> int:
        return self.offsets[index] + len(self.token_ids[index])

    def rows(self, index: int, places: Tensor) -> Tensor:
        """The rows of these tokens of a request in tables of angles, int64 [n]; see `RotaryTable`."""
        is_long = 0 < self.short_length < self._end(index)
        return places + self.offsets[index] + (self.short_length if is_long else 0)

    @classmethod
    def make(cls, vocab_size: int, max_model_len: int) -> DryRun:
        """Random tokens at the first and last positions, since some models change behaviour at high positions."""
        generator = torch.Generator().manual_seed(0)
        token_ids = [torch.randint(0, vocab_size, (n,), generator=generator) for n in LENGTHS]
        return cls(token_ids, [0, max(0, max_model_len - LENGTHS[1])])


def reference_logits(weights: Weights, run: DryRun) -> list[Tensor]:
    """Logits [n, V] of each request by the original module; see `reference`."""

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        output = weights.causal(input_ids=ids, position_ids=positions, use_cache=False)
        return output.logits[0]  # type: ignore[no-any-return]

    return reference(weights, run, forward)


def reference(weights: Weights, run: DryRun, forward: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """What the original module makes of each request.

    The module's weights are read layer by layer, so it never needs to be in memory as a whole; both requests run a
    layer before the next one is read.

    forward: of the module, with token ids and positions int64 [1, n]; gives a tensor [n, ...]. It is called in
    threads, of which one runs at a time.

    Raises:
        LoadError: the module's forward pass fails.
    """
    causal = weights.causal

    @torch.inference_mode()
    def logits(ids: Tensor, offset: int) -> Tensor:
        device = causal.get_input_embeddings().weight.device
        positions = torch.arange(offset, offset + len(ids), device=device)[None]
        return forward(ids[None].to(device), positions).cpu()

    passes = [partial(logits, *request) for request in zip(run.token_ids, run.offsets, strict=True)]
    lockstep = Lockstep()
    try:
        with weights.streamed(lockstep):
            return lockstep.run(passes)
    except Exception as error:
        name, reason = type(causal).__name__, first_line(error)
        logger.info("%s does not run with one layer at a time, so it is read as a whole: %s", name, reason)
    weights.fill(causal)
    try:
        return [one_pass() for one_pass in passes]
    except Exception as error:
        raise refuse(causal.config, f"its forward pass fails: {first_line(error)}") from error


def expected_logits(
    weights: Weights, run: DryRun, dtype: torch.dtype, device: Device, collective: Collective
) -> list[Tensor]:
    """See `reference_logits`: computed by rank 0, for all ranks.

    dtype: of the model.

    Raises:
        LoadError: on rank 0, the module's forward pass fails.
    """
    expected = reference_logits(weights, run) if collective.rank == 0 else []
    if collective.size == 1:
        return expected
    output = weights.causal.get_output_embeddings()
    if output is None:
        raise refuse(weights.causal.config, "it has no output layer that could be divided over several ranks")
    vocab_size = output.weight.shape[0]
    shared = []
    for index, ids in enumerate(run.token_ids):
        own = expected[index] if expected else torch.zeros(len(ids), vocab_size)
        logits = collective.broadcast(own.to(device.torch_device, torch.float32).contiguous(), 0)
        shared.append(logits.cpu().to(dtype))
    return shared


def paged_logits(model: Model, run: DryRun, recorder: DryRunRecorder) -> list[Tensor]:
    """Logits [n, V] of each request on a paged cache, with the requests batched and chunked.

    Empty in a stage before the last, which takes its part in the same steps.
    """
    done = [0] * len(LENGTHS)
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    for lengths in CHUNKS:
        places = [torch.arange(d, d + n) for d, n in zip(done, lengths, strict=True)]
        done = [d + n for d, n in zip(done, lengths, strict=True)]
        ids = torch.cat([t[p] for t, p in zip(run.token_ids, places, strict=True)])
        positions = torch.cat([run.rows(index, p) for index, p in enumerate(places)])
        batch = dry_batch(places, done)
        tensors = (
            ids,
            positions,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.slot_mapping,
        )
        ids, positions, starts, lens, table, kv_slots = recorder.device.upload(tensors)
        batch = AttentionBatch(starts, lens, table, kv_slots, batch.max_query_len, batch.max_seq_len)
        step = recorder.step(batch, positions)
        states = model.hidden_states(ids, step, model.received(len(ids)))
        if not model.makes_logits:
            continue
        logits = model.logits(states).cpu()
        for part, rows in zip(parts, torch.split(logits, list(lengths)), strict=True):
            part.append(rows)
    return [torch.cat(part) for part in parts if part]


def dry_batch(places: list[Tensor], seq_lens: list[int]) -> AttentionBatch:
    """A batch of requests with 3 interleaved KV blocks each. places: each request's tokens, as indices into it."""
    num_requests = len(places)
    lengths = torch.tensor([len(p) for p in places])
    table = torch.arange(3 * num_requests, dtype=torch.int32).view(3, num_requests).T.contiguous()
    kv_slots = [table[r][p // BLOCK].long() * BLOCK + p % BLOCK for r, p in enumerate(places)]
    return AttentionBatch(
        query_start_loc=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(kv_slots),
        max_query_len=int(lengths.max()),
        max_seq_len=max(seq_lens),
    )


def prove(
    model: Model,
    run: DryRun,
    expected: list[Tensor],
    schemes: Iterable[Scheme],
    max_model_len: int,
    device: Device,
    collective: Collective,
) -> list[KVShape]:
    """Run the transformed model and compare its logits. Returns the KV shape of each layer.

    expected: of the original module, with dequantised weights. schemes: of the weights, which say how much the
    rounding of activations may cost.

    Raises:
        LoadError: the architecture is not supported; the text says why. If all ranks of the group raise it, it is a
            `DisprovenError`.
    """
    recorder = DryRunRecorder(3 * len(LENGTHS), BLOCK, device)
    config = model.config
    try:
        actual = paged_logits(model, run, recorder)
    except LoadError as error:
        raise refuse(config, str(error)) from error
    except Exception as error:
        raise refuse(config, f"paged attention does not fit it: {first_line(error)}") from error
    check_calls(config, recorder.calls, None if model.stage is None else model.stage.layers)
    check_windows(config, recorder.calls, max_model_len)
    difference = worst_difference(actual, expected) if actual else 0.0
    wrong = torch.tensor([difference > permitted_difference(expected[0].dtype, schemes)], dtype=torch.float32)
    if collective.all_reduce(
        wrong.to(device.torch_device)
    ).item():  # all ranks must come to the same conclusion
        by = f"by {difference:.1%}" if actual else "the last stage has them"
        raise DisprovenError(str(refuse(config, f"its logits with paged attention are wrong ({by})")))
    logger.debug("logits differ from the original module's by %.2f%%", 100 * difference)
    return recorder.kv_shapes()


def permitted_difference(dtype: torch.dtype, schemes: Iterable[Scheme]) -> float:
    """Permitted relative difference of logits in this dtype, if products have weights of these schemes.

    Products with quantised weights round most activations to 8 bits. That costs about 1% in the 30 layers of
    SmolLM2, and before outliers were exempt it cost at most 3% in random models. A wrong order of rows, columns or
    halves of a byte makes over 100%, and so does a zero of 4 bits that is off by 1. Single products are proven more
    sharply (`products.py`).
    """
    return ROUNDED if any(isinstance(scheme, Integers) for scheme in schemes) else tolerance(dtype)


def check_calls(config: Any, calls: AttentionCalls, layers: range | None = None) -> None:
    """Check that each of these decoder layers, and no other, called attention once per step.

    layers: None: all that run without pictures.

    Raises:
        LoadError: a layer did not.
    """
    if not calls.num_calls:
        raise refuse(config, "it does not let its attention be replaced")
    layers = range(config.get_text_config().num_hidden_layers) if layers is None else layers
    for layer in sorted({*layers, *calls.num_calls} - picture_layers(config)):
        if (num_calls := calls.num_calls.get(layer, 0) / calls.num_steps) != 1:
            raise refuse(config, f"layer {layer} calls attention {num_calls:g} times, not once")


def check_windows(config: Any, calls: AttentionCalls, max_model_len: int) -> None:
    """Check that sliding-window layers passed their window to attention; the dry run is too short to show it.

    Raises:
        LoadError: a layer did not.
    """
    layers = layer_configs(config)
    for layer in calls.shapes:
        kinds = getattr(layers[layer], "layer_types", None)
        window = getattr(layers[layer], "sliding_window", None)
        sliding = kinds is None or kinds[layer] == "sliding_attention"
        if window is None or window >= max_model_len or not sliding:
            continue
        if calls.windows[layer] is None:
            raise refuse(config, f"layer {layer} does not hand its sliding window to attention")


def worst_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
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


def relative_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Relative difference of logits [n, V], as the median over tokens.

    The median, because rounding may send single tokens to other experts, while an error in the model affects most
    tokens.
    """
    a, b = torch.cat(actual).float(), torch.cat(expected).float()
    errors = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-6)
    return float(errors.nan_to_num(torch.inf).median())
