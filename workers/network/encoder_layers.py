"""Layers of transformers' encoders of pictures and sound, computed by one call of the kernels each.

The encoder's own forward goes on to run: what is before, between and behind its layers, and what it keeps of their
results. A layer is replaced if it has known parts and computes what its module computes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewire.kernels.data.integers import Integers
from pagewire.kernels.data.layer import Activation, Layer
from pagewire.kernels.data.paging import AttentionBatch, LogitTerms
from pagewire.kernels.data.weight import dense_weight
from pagewire.kernels.linear import Linear, dense
from pagewire.kernels.ops import activate_each
from pagewire.kernels.stack import Stack
from pagewire.workers.caches.kv import PAGE, Pages, in_pages
from pagewire.workers.families.structures import (
    LayerParts,
    OtherStructureError,
    norm_of,
    require,
)
from pagewire.workers.module.products import packed
from pagewire.workers.module.transforms import pack_joined
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.build import kv_shape
from pagewire.workers.network.proof import permitted_difference, relative_difference

logger = logging.getLogger("pagewire.worker")

TRIED_TOKENS = 24
HEAD_STEP = 32  # elements: what matrix units multiply at a time in bfloat16
CPU = torch.device("cpu")


class EncoderLayer:
    """A layer in place of its module's forward. pages: for keys and values, one after the other of all layers."""

    def __init__(self, stack: Stack, pages: Pages) -> None:
        self._stack, self._pages = stack, pages
        self._shape = kv_shape(stack.layers[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self._stack.num_bytes

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """The layer's results for states [B, T, H], or [T, H] of several sequences; of the same shape.

        attention_mask: [B, 1, T or 1, T], True or 0 for keys that all queries see; None: they see all. The results
            of tokens that nobody sees are their states.
        cu_seqlens: int [n + 1], where each of the sequences [T, H] begins, and the last one ends.
        position_embeddings: cosines and sines [T, D] or [1, T, D], of B = 1.
        """
        places = None
        if cu_seqlens is not None:
            lengths = tuple(cu_seqlens.diff().tolist())
        elif attention_mask is None:
            lengths = (hidden_states.shape[1],) * len(hidden_states)
        else:
            first = attention_mask[:, 0, 0]
            places = first if first.dtype is torch.bool else first == 0
            lengths = tuple(places.sum(1).tolist())
        size = hidden_states.shape[-1]
        states = hidden_states.reshape(-1, size) if places is None else hidden_states[places]
        states = states.clone(memory_format=torch.contiguous_format)
        angles = []
        if position_embeddings is not None:
            cos, sin = (part.reshape(-1, part.shape[-1]).to(states.dtype) for part in position_embeddings)
            angles = [(cos, sin) if places is None else (cos[places[0]], sin[places[0]])]
        batch = paged_batch(lengths)
        self._stack(states, batch, [self._pages.of(self._shape, num_pages(lengths), states.device)], angles)
        if places is None:
            return states.view(hidden_states.shape)
        return hidden_states.masked_scatter(places[..., None], states)


def num_pages(lengths: tuple[int, ...]) -> int:
    """The number of pages of sequences of these lengths."""
    return sum(-(-length // PAGE) for length in lengths)


@lru_cache(maxsize=64)
def paged_batch(lengths: tuple[int, ...]) -> AttentionBatch:
    """The batch of whole sequences of these lengths, one behind the other."""
    filled = [length for length in lengths if length]
    sizes = torch.tensor(filled, dtype=torch.int64)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    positions = torch.cat([torch.arange(length) for length in filled])
    batch = AttentionBatch(
        query_start_loc=ends.int(),
        seq_lens=sizes.int(),
        block_table=torch.zeros(len(filled), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
        max_query_len=max(filled),
        max_seq_len=max(filled),
    )
    return in_pages(batch, positions)


NORMS = (
    ("layer_norm1", "layer_norm2"),
    ("norm1", "norm2"),
    ("attention_norm", "ffn_norm"),
    ("self_attn_layer_norm", "final_layer_norm"),
)
ATTENTIONS = (("self_attn",), ("attn",), ("attention",))
QKV = (("q_proj", "k_proj", "v_proj"), ("qkv",))
OUT = (("out_proj",), ("o_proj",), ("proj",))
FEED_FORWARD = (("mlp",), ("feed_forward",))
UP = (("gate_proj", "up_proj"), ("fc1",), ("linear_fc1",))
DOWN = (("down_proj",), ("fc2",), ("linear_fc2",))
ACTIVATION = (("activation_fn",), ("act_fn",), ("act",))


class Children:
    """The children of a module, taken by name."""

    def __init__(self, module: nn.Module) -> None:
        self._left = dict(module.named_children())

    def take(self, *groups: Sequence[tuple[str, ...]]) -> list[Any]:
        """The children of one of the tuples of names in each group. Raises OtherStructureError: there are none."""
        found: list[Any] = []
        for group in groups:
            names = next((names for names in group if self._left.keys() >= set(names)), None)
            require(names is not None)
            found += [self._left.pop(name) for name in names or ()]
        return found

    def end(self) -> None:
        """Raise OtherStructureError if something is left."""
        require(not self._left)


def parts_of(layer: nn.Module) -> tuple[LayerParts, Any]:
    """The parts of a layer, and its activation.

    Raises:
        OtherStructureError: it has others.
    """
    own = Children(layer)
    *norms, attention = own.take(NORMS, ATTENTIONS)
    try:
        inner = Children(own.take(FEED_FORWARD)[0])
    except OtherStructureError:
        inner = own  # Whisper's
    *up, down, activation = inner.take(UP, DOWN, ACTIVATION)
    heads = Children(attention)
    *qkv, out = heads.take(QKV, OUT)
    for part in (own, inner, heads):
        part.end()
    head_dim = out.in_features // attention.num_heads
    return LayerParts(qkv, out, up, down, (norms[0], norms[1]), head_dim, gated=len(up) > 1), activation


def compile_layers(encoder: nn.Module, weights: Weights, device: torch.device) -> list[EncoderLayer]:
    """Replace the forward of an encoder's layers where the kernels of the device can, and drop their modules.

    Modules stay on GPUs, which have not run these layers, where layers are divided over ranks, and in float16, in
    which transformers clamps sums.
    """
    if device != CPU or weights.shards is not None:
        return []
    found: list[EncoderLayer] = []
    pages = Pages()
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList) and len(module)]
    for layers in lists:
        try:
            compiled = _tried(layers[0], weights, pages)
            rest = [EncoderLayer(_stack(layer, weights), pages) for layer in list(layers)[1:]]
        except (OtherStructureError, AttributeError) as error:
            logger.debug("layers of %s run as modules: %s", type(layers[0]).__name__, error)
            continue
        for layer, own in zip(layers, [compiled, *rest], strict=True):
            layer.forward = own
            layer._modules.clear()
            found.append(own)
    return found


def _tried(layer: Any, weights: Weights, pages: Pages) -> EncoderLayer:
    """The first layer of an encoder, if it computes what its module computes."""
    compiled = EncoderLayer(_stack(layer, weights), pages)
    weights.fill(layer)
    parts, _ = parts_of(layer)
    dtype = parts.out.weight.dtype
    require(dtype is not torch.float16)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TRIED_TOKENS, parts.out.out_features, generator=generator).to(dtype)
    taken = inspect.signature(layer.forward).parameters
    given: dict[str, Any] = {"attention_mask": None} if "attention_mask" in taken else {}
    if "position_embeddings" in taken:
        angles = torch.randn(TRIED_TOKENS, parts.head_dim // 2, generator=generator).repeat(1, 2)
        given["position_embeddings"] = angles.cos().to(dtype), angles.sin().to(dtype)
    if "cu_seqlens" in taken:
        given["cu_seqlens"] = torch.tensor([0, TRIED_TOKENS - 7, TRIED_TOKENS], dtype=torch.int32)
    else:
        states = states[None]
    with torch.inference_mode(), attention_of_pytorch(layer):
        expected = layer(states.clone(), **given)
        actual = compiled(states, **given)
    require(isinstance(expected, Tensor) and expected.shape == states.shape)
    # What the layer adds is compared: the states would hide an error in it.
    added = [(part - states).reshape(-1, states.shape[-1]) for part in (actual, expected)]
    difference = relative_difference(added[:1], added[1:])
    if difference > permitted_difference(dtype, weights.schemes):
        raise OtherStructureError(f"it computes something else, by {difference:.2g}")
    return compiled


@contextmanager
def attention_of_pytorch(layer: nn.Module) -> Iterator[None]:
    """A context in which a layer may run outside of a step."""
    configs = {id(config): config for part in layer.modules() if (config := getattr(part, "config", None))}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _stack(layer: Any, weights: Weights) -> Stack:
    """A stack of one layer, whose sum is the layer's result."""
    parts, activation = parts_of(layer)
    first, second = (norm_of(norm, weights, CPU) for norm in parts.norms)
    num_heads = parts.out.in_features // parts.head_dim
    qkv, out, head_dim = around_attention(parts, weights)
    own = Layer(
        qkv=qkv,
        out=out,
        attention_norm=second,
        up=pack_joined(parts.up, weights, CPU),
        down=pack_joined([parts.down], weights, CPU),
        output_norm=first,  # what it makes is dropped
        activation=activation_of(activation),
        gated=parts.gated,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=parts.head_dim**-0.5,
        angles=0 if "position_embeddings" in inspect.signature(layer.forward).parameters else None,
        terms=LogitTerms.two_sided(),
    )
    return Stack(first, [own])


def around_attention(parts: LayerParts, weights: Weights) -> tuple[Linear, Linear, int]:
    """The products before and behind attention, and the size of a head.

    Heads of plain numbers of 16 bits get zeros up to the next multiple of `HEAD_STEP`: what attention gains is more
    than what the products lose.
    """
    linears = [*parts.qkv, parts.out]
    matrices = [weights.matrix(linear) for linear in linears]
    more = -parts.head_dim % HEAD_STEP if matrices[0].dtype.itemsize == 2 else 0
    if not more or any(isinstance(matrix.scheme, Integers) for matrix in matrices):
        return pack_joined(parts.qkv, weights, CPU), pack_joined([parts.out], weights, CPU), parts.head_dim
    *rows, columns = (dense(matrix) for matrix in matrices)
    size = parts.head_dim
    heads = torch.cat(rows).reshape(-1, size, rows[0].shape[1])
    wider = functional.pad(heads, (0, 0, 0, more)).flatten(0, 1)
    longer = functional.pad(columns.reshape(len(columns), -1, size), (0, more)).flatten(1)
    biases = [
        matrix.new_zeros(len(matrix)) if (bias := weights.part(linear, "bias")) is None else bias
        for linear, matrix in zip(parts.qkv, rows, strict=True)
    ]
    bias = functional.pad(torch.cat(biases).reshape(-1, size), (0, more)).flatten()
    qkv = packed(dense_weight(wider), bias, CPU)
    return qkv, packed(dense_weight(longer), weights.part(parts.out, "bias"), CPU), size + more


def activation_of(function: Callable[[Tensor], Tensor]) -> Activation:
    """The activation of each element that a function computes. Raises OtherStructureError: the kernels lack it."""
    x = torch.linspace(-6.0, 6.0, 97)
    for activation in Activation:
        if activation is not Activation.CLAMPED_SWIGLU and torch.allclose(
            activate_each(x, activation), function(x), rtol=1e-5, atol=2e-6
        ):
            return activation
    raise OtherStructureError("the kernels do not have its activation")
