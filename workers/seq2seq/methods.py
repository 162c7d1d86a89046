"""Methods of transformers' encoder-decoders that are ours within a step (`replaced_methods`).

Cross-attention reads the keys and values that were stored for the source; positions are those of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor

from pagewire.kernels.data.paging import LogitTerms
from pagewire.kernels.ops import paged_attention
from pagewire.workers.module.recurrences import in_steps
from pagewire.workers.step.context import current_step

BIAS_TILE = 256
"""Distances that a bias is rounded up to a multiple of, see `LogitTerms.relative_bias`."""


@dataclass(frozen=True)
class Projections:
    """The names of the linear layers of a family's attention, and of the argument that has an encoder's states.

    num_results: of its forward; all but the first are None here.
    """

    query: str
    key: str
    value: str
    out: str
    states: str = "key_value_states"
    num_results: int = 2


BART = Projections("q_proj", "k_proj", "v_proj", "out_proj")
T5 = Projections("q", "k", "v", "o", num_results=3)
UMT5 = Projections("q", "k", "v", "o", states="encoder_hidden_states")


def cross_attention(names: Projections) -> Callable[..., Any]:
    """The forward of an attention that is cross-attention if it gets states of an encoder."""

    def forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(names.states) is None:
            return type(module).forward(module, hidden_states, *args, **kwargs)
        step = current_step()
        assert step.sources is not None, "the model has sources"
        projected = getattr(module, names.query)(hidden_states)
        heads = projected[0].unflatten(-1, (-1, head_dim(module)))
        cache = step.caches[module.layer_idx]
        mixed = paged_attention(heads, cache, step.sources.cross, module.scaling, LogitTerms())
        out = getattr(module, names.out)(mixed.flatten(1)[None])
        return (out, *[None] * (names.num_results - 1))

    return forward


def head_dim(module: Any) -> int:
    """The size of the heads of an attention."""
    size: int = getattr(module, "head_dim", None) or module.key_value_proj_dim
    return size


def cross_heads(module: Any, names: Projections, states: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [S, Hkv, D] of an encoder's states [S, H] by a layer's cross-attention."""
    key, value = (
        getattr(module, name)(states[None])[0].unflatten(-1, (-1, head_dim(module)))
        for name in (names.key, names.value)
    )
    return key, value


def _distance_bias(module: Any, *_: Any, **__: Any) -> Tensor:
    """Of T5: a table by distance float32 [Hq, 2 R] in place of a bias for each query and key.

    Layers hand it on to each other, and to attention, see `LogitTerms.relative_bias`.
    """
    radius = -(-current_step().batch.max_seq_len // BIAS_TILE) * BIAS_TILE
    table: Tensor | None = getattr(module, "distance_bias", None)
    if table is None or table.shape[1] < 2 * radius:
        # The row of the query at position R has all distances from -R on.
        row = type(module).compute_bias(module, 1, 2 * radius, past_seen_tokens=radius)
        table = module.distance_bias = row[0, :, 0].float().contiguous()
    return table


def _learned(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A table of positions, which are the step's."""
    return type(module).forward(module, *args, **{**kwargs, "position_ids": current_step().positions})


def _sinusoidal(module: Any, *_: Any, **__: Any) -> Tensor:
    """Of M2M100 and NLLB, which count positions from behind the padding token."""
    first = module.padding_idx + 1
    positions = current_step().positions + first
    if int(current_step().batch.max_seq_len) + first > len(module.weights):
        module.make_weights(
            current_step().batch.max_seq_len + first, module.embedding_dim, module.padding_idx
        )
    return module.weights.index_select(0, positions)[None]  # type: ignore[no-any-return]


ATTENTION: dict[str, Projections] = {
    **dict.fromkeys(
        (
            "BartAttention",
            "BlenderbotAttention",
            "BlenderbotSmallAttention",
            "M2M100Attention",
            "MBartAttention",
            "MarianAttention",
            "PLBartAttention",
            "PegasusAttention",
            "WhisperAttention",
        ),
        BART,
    ),
    **dict.fromkeys(("T5Attention", "MT5Attention"), T5),
    "UMT5Attention": UMT5,
}
"""The attention of encoder-decoders by its class."""
POSITIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            "BartLearnedPositionalEmbedding",
            "BlenderbotLearnedPositionalEmbedding",
            "BlenderbotSmallLearnedPositionalEmbedding",
            "MBartLearnedPositionalEmbedding",
            "MarianSinusoidalPositionalEmbedding",
            "PLBartLearnedPositionalEmbedding",
            "PegasusSinusoidalPositionalEmbedding",
            "WhisperPositionalEmbedding",
        ),
        _learned,
    ),
    "M2M100SinusoidalPositionalEmbedding": _sinusoidal,
}
"""Their tables of positions."""


def replace_coders(causal: Any) -> None:
    """Replace the methods of the attention and the positions within an encoder-decoder."""
    for module in causal.modules():
        name = type(module).__name__
        ours: dict[str, Callable[..., Any]] = {}
        if (names := ATTENTION.get(name)) is not None:
            ours["forward"] = cross_attention(names)
            if hasattr(module, "compute_bias"):
                ours["compute_bias"] = _distance_bias
        elif name in POSITIONS:
            ours["forward"] = POSITIONS[name]
        for method, function in ours.items():
            setattr(module, method, MethodType(in_steps(getattr(type(module), method), function), module))


def cross_layers(decoder: Any) -> list[tuple[Any, Projections]]:
    """The cross-attention of each of a decoder's layers, with the names of its projections."""
    return [
        (child, ATTENTION[type(child).__name__])
        for name, child in decoder.named_modules()
        if name.endswith(("encoder_attn", "EncDecAttention")) and type(child).__name__ in ATTENTION
    ]
