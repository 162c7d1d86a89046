"""How the mixers of layers with states are divided over ranks: each has some of the heads, with their states.

What a rank has of a mixer is a mixer with fewer heads, which `workers/module/recurrences.py` computes as any other;
its last product gives a part of a sum over the ranks. Heads that share keys (or the inputs and outputs of a state
space) stay together as far as there are such groups for every rank; else ranks hold the same group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from pagewire.workers.errors import LoadError
from pagewire.workers.ranks.shares import Heads, scaled, width_spans

CONVOLUTIONS = ("conv", "conv1d", "conv_1d", "conv_qk_depthwise")
"""Names of convolutions in mixers with states."""
Spans = tuple[tuple[range, ...], ...]
"""For each rank, its places in a dimension, which are one behind the other in its part."""


class MixerPart(NamedTuple):
    """Consecutive places of a dimension: as many for each head, or for each group of heads."""

    width: int
    of_groups: bool = False


@dataclass(frozen=True)
class MixerCuts:
    """How a mixer is divided.

    rows: by the names of its linear layers and vectors, how their outputs or elements are divided. columns: of its
    last linear layer. sizes: of each rank, the attributes that are its own. normed: how what is normed as a whole
    is divided; None: each rank norms its own.
    """

    rows: dict[str, Spans]
    columns: tuple[str, Spans]
    sizes: tuple[dict[str, int], ...]
    normed: Spans | None = None


def cuts_of(mixer: Any, num_ranks: int) -> MixerCuts | None:
    """How a mixer is divided over so many ranks; None: it is of a kind that is not.

    Raises:
        LoadError: its heads cannot be divided over them.
    """
    cut = KINDS.get(type(mixer).__name__)
    return None if cut is None else cut(mixer, num_ranks)


def keeps_states(module: Any) -> bool:
    """True for a mixer of a model whose layers keep states: it has a convolution, or lightning attention's gate."""
    convolutions = (getattr(module, name, None) for name in CONVOLUTIONS)
    return hasattr(module, "output_gate") or any(isinstance(own, nn.Conv1d) for own in convolutions)


def _spans(parts: Sequence[MixerPart], heads: Heads, num_ranks: int) -> Spans:
    """How parts that follow each other are divided."""
    found = []
    for rank in range(num_ranks):
        start, own = 0, []
        for part in parts:
            units = heads.share(rank, num_ranks)[part.of_groups]
            places = scaled(units, part.width)
            own.append(range(start + places.start, start + places.stop))
            start += part.width * (heads.num_kv if part.of_groups else heads.num)
        found.append(tuple(own))
    return tuple(found)


def _short_conv(mixer: Any, num_ranks: int) -> MixerCuts:
    """Of LFM2: by channels."""
    width = mixer.conv.out_channels
    own = width_spans(width, num_ranks)
    thrice = tuple(
        tuple(range(span.start + i * width, span.stop + i * width) for i in range(3)) for span in own
    )
    once = tuple((span,) for span in own)
    return MixerCuts({"in_proj": thrice, "conv": once}, ("out_proj", once), ({},) * num_ranks)


def _delta_rule(mixer: Any, num_ranks: int) -> MixerCuts:
    """Of Qwen3.5 and Qwen3-Next."""
    heads = Heads(mixer.num_v_heads, mixer.num_k_heads)
    key_dim, value_dim = mixer.head_k_dim, mixer.head_v_dim
    key, value, one = MixerPart(key_dim, True), MixerPart(value_dim), MixerPart(1)
    joined = {"conv1d": [key, key, value], "dt_bias": [one], "A_log": [one]}
    if hasattr(mixer, "in_proj_qkvz"):  # what belongs to a head of keys lies together
        if num_ranks > heads.num_kv:
            raise LoadError(
                f"its linear attention has {heads.num_kv} heads of keys, which lie together with their values; up "
                f"to {heads.num_kv} ranks work"
            )
        per_key = heads.num // heads.num_kv
        joined["in_proj_qkvz"] = [MixerPart(2 * key_dim + 2 * value_dim * per_key, True)]
        joined["in_proj_ba"] = [MixerPart(2 * per_key, True)]
    else:
        joined |= {
            "in_proj_qkv": [key, key, value],
            "in_proj_z": [value],
            "in_proj_b": [one],
            "in_proj_a": [one],
        }
    sizes = []
    for rank in range(num_ranks):
        own, groups = map(len, heads.share(rank, num_ranks))
        keys, values = groups * key_dim, own * value_dim
        sizes.append(
            {"num_v_heads": own, "num_k_heads": groups, "key_dim": keys, "value_dim": values}
            | {"conv_dim": 2 * keys + values}
        )
    rows = {name: _spans(parts, heads, num_ranks) for name, parts in joined.items()}
    return MixerCuts(rows, ("out_proj", _spans([value], heads, num_ranks)), tuple(sizes))


def _state_space(mixer: Any, num_ranks: int) -> MixerCuts:
    """Of Mamba 2 and the families that have its mixer. A group that several ranks have is normed as a whole."""
    heads = Heads(mixer.num_heads, mixer.n_groups)
    if mixer.n_groups > 1 and mixer.n_groups % num_ranks:
        works = [n for n in range(2, mixer.n_groups + 1) if mixer.n_groups % n == 0]
        raise LoadError(
            f"its state space has {mixer.n_groups} groups of heads; numbers of ranks that work: "
            f"{', '.join(map(str, works))}"
        )
    value, state, one = MixerPart(mixer.head_dim), MixerPart(mixer.ssm_state_size, True), MixerPart(1)
    joined = {
        "in_proj": [value, value, state, state, one],
        "conv1d": [value, state, state],
        "dt_bias": [one],
        "A_log": [one],
        "D": [one],
    }
    of_values = _spans([value], heads, num_ranks)
    is_shared = mixer.n_groups < num_ranks
    if not is_shared:
        joined["norm"] = [value]
    sizes = []
    for rank in range(num_ranks):
        own, groups = map(len, heads.share(rank, num_ranks))
        values = own * mixer.head_dim
        sizes.append(
            {"num_heads": own, "n_groups": groups, "intermediate_size": values}
            | {"conv_dim": values + 2 * groups * mixer.ssm_state_size}
        )
    rows = {name: _spans(parts, heads, num_ranks) for name, parts in joined.items()}
    return MixerCuts(rows, ("out_proj", of_values), tuple(sizes), of_values if is_shared else None)


KINDS: dict[str, Callable[[Any, int], MixerCuts]] = {
    **dict.fromkeys(("Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv"), _short_conv),
    **dict.fromkeys(
        ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet"), _delta_rule
    ),
    **dict.fromkeys(("BambaMixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer"), _state_space),
    "NemotronHMamba2Mixer": _state_space,
}
"""By the class of a mixer."""
