"""The sizes of a model by its configuration, with the names that the families use for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.ipc.positions import MAX_POSITIONS
from pagewire.workers.estimate.inventory import Matrix, Part
from pagewire.workers.estimate.states import Shapes, state_bytes
from pagewire.workers.module.structure import DEFAULT_POSITIONS, NUM_EXPERTS

NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "max_positions": MAX_POSITIONS,
    "num_experts": NUM_EXPERTS,
    "experts_per_token": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_k",
        "top_k_experts",
    ),
}
KV_NAMES = (
    *(f".{name}{suffix}" for name in ("k_proj", "v_proj", "kv_b_proj") for suffix in ("", ".weight")),
    ".self_attn.dt_proj.weight",  # of Doge, whose keys have one more number
)
"""Ends of the names of matrices whose outputs go into the KV cache."""


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model that memory and time depend on; 0 where the configuration does not say."""

    architecture: str
    model_type: str
    dtype: str
    """Of the checkpoint: "bfloat16", "float16" or "float32"."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    num_experts: int
    experts_per_token: int
    kv_elements: int
    """Numbers that a token adds to the KV cache, in all layers."""
    kv_scales: int
    """Heads of keys and of values, in all layers: each has scales where the cache is of integers."""
    has_latents: bool
    """The cache has latents, of which heads are made."""
    index_elements: int
    """Numbers that a token adds to the keys of indexers, in all layers; they have the model's own dtype."""
    rotary_elements: int
    """Numbers of the rotary tables for a position."""
    state_bytes: int
    """Of the states that all layers keep of a sequence, whatever its length."""
    attention_size: int
    """The most inputs of a product of attention: numbers of all query heads."""
    inner_size: int
    """The most inputs of a product of a feed-forward half: numbers behind its activation; 0: it has none."""
    expert_size: int
    """The same of an expert."""

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        matrices: Sequence[Matrix],
        recurrent: Mapping[str, Shapes] | None = None,
        *,
        latents: Mapping[int, int] | None = None,
    ) -> Dimensions:
        """The sizes in a configuration; those of keys and values by their own matrices where they have some.

        recurrent: the modules that keep states, see `recurrent_modules`; None: none do.
        latents: the elements of latents that kernels attend to, as keys and as values; the cache has what others
        expand to. None: kernels attend to all.
        """
        recurrent = recurrent or {}
        text: Mapping[str, Any] = {**config, **(config.get("text_config") or {})}
        if latents is not None and (rank := _number(text, ("kv_lora_rank",))):
            served = latents.get(rank + _number(text, ("qk_rope_head_dim",))) == rank
            text = text if served else _expanded(text)
        sizes = {field: _number(text, names) for field, names in NAMES.items()}
        del sizes["num_heads"]
        head_dim = _head_dim(text)
        architectures = config.get("architectures") or text.get("architectures") or []
        model_type = str(text.get("model_type") or config.get("model_type") or "")
        kv = {m.name.removesuffix(".weight"): m.rows for m in matrices if m.name.endswith(KV_NAMES)}
        kv = {name: rows for name, rows in kv.items() if name.rpartition(".")[0] not in recurrent}
        kv_rows = sum(rows for name, rows in kv.items() if not name.endswith("kv_b_proj"))
        num_attending = _num_attending(text, kv) if recurrent else sizes["num_layers"]
        others = _other_layers(text)
        kv_elements, kv_scales = _kv_of_layers(text, num_attending, others)
        if kv_rows and not (others or _num_without(text)):
            num_stored = len({name.rpartition(".")[0] for name in kv}) if recurrent else 1
            kv_elements = kv_rows * (num_attending if recurrent else 1) // num_stored
            kv_scales = kv_elements // max(1, head_dim)
        sizes["max_positions"] = sizes["max_positions"] or DEFAULT_POSITIONS
        return cls(
            architecture=str(architectures[0]) if architectures else model_type,
            model_type=model_type,
            dtype=_dtype(text),
            vocab_size=_number(text, ("vocab_size",)),
            kv_elements=kv_elements,
            kv_scales=kv_scales,
            has_latents=_number(text, ("kv_lora_rank",)) > 0,
            index_elements=_num_indexers(text, sizes["num_layers"]) * _number(text, ("index_head_dim",)),
            rotary_elements=2
            * (_number(text, ("qk_rope_head_dim",)) or sum({head_dim, *map(_head_dim, others.values())}))
            * (num_attending > 0),
            state_bytes=state_bytes(recurrent, text),
            attention_size=_most_inputs(matrices, Part.ATTENTION),
            inner_size=_most_inputs(matrices, Part.FEED_FORWARD),
            expert_size=_most_inputs(matrices, Part.EXPERTS),
            **sizes,
        )


def _expanded(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a model with latents as those of one with the heads that they expand to."""
    size = sum(_number(text, (f"qk_{part}_head_dim",)) for part in ("nope", "rope"))
    others = {name: value for name, value in text.items() if name != "kv_lora_rank"}
    return {**others, "head_dim": size, "num_key_value_heads": _number(text, NAMES["num_heads"])}


def _most_inputs(matrices: Iterable[Matrix], part: Part) -> int:
    """The most columns of a part's matrices."""
    return max((m.columns for m in matrices if m.part is part and not m.is_vector), default=0)


def _num_attending(text: Mapping[str, Any], kv: Iterable[str]) -> int:
    """The number of layers that attend in a model with states. kv: the names of matrices of keys and values.

    Those of Zamba share attention, whose weights are in the first of them.
    """
    kinds = text.get("layers_block_type") or text.get("layer_types") or ()
    num_hybrid = sum(kind in ("hybrid", "hybrid_sliding") for kind in kinds)
    return max(len({name.rpartition(".")[0] for name in kv}), num_hybrid)


def _other_layers(text: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The settings of layers that differ from those of the model, by their numbers."""
    changes = text.get("per_layer_config")
    if changes is None and text.get("global_head_dim"):  # as Gemma 4 has them
        own = {"head_dim": text["global_head_dim"]}
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = text["num_global_key_value_heads"]
        kinds = text.get("layer_types") or ()
        changes = {layer: own for layer, kind in enumerate(kinds) if kind == "full_attention"}
    return {int(layer): {**text, **own} for layer, own in (changes or {}).items()}


def _head_dim(text: Mapping[str, Any]) -> int:
    num_heads = max(1, _number(text, NAMES["num_heads"]))
    return (
        _number(text, ("head_dim", "attention_head_dim")) or _number(text, NAMES["hidden_size"]) // num_heads
    )


def _kv_of_layers(
    text: Mapping[str, Any], num_layers: int, others: Mapping[int, Mapping[str, Any]]
) -> tuple[int, int]:
    """`kv_elements` and `kv_scales` by a configuration. others: see `_other_layers`."""
    last = num_layers - _num_without(text)
    different = [settings for layer, settings in others.items() if layer < last]
    num_alike = last - len(different)
    return (
        num_alike * _kv_of_layer(text) + sum(map(_kv_of_layer, different)),
        num_alike * _kv_vectors(text) + sum(map(_kv_vectors, different)),
    )


def _num_without(text: Mapping[str, Any]) -> int:
    """Layers without keys and values of their own: the last ones read those of others, some look at pictures."""
    return _number(text, ("num_kv_shared_layers",)) + len(text.get("cross_attention_layers") or ())


def _num_indexers(text: Mapping[str, Any], num_layers: int) -> int:
    """Layers that choose the keys which a token sees; others may see what the layer before them has chosen."""
    if kinds := text.get("indexer_types"):
        return list(kinds).count("full")
    kinds = list(text.get("layer_types") or ())
    if set(kinds) == {"full_attention"}:  # MiniMax M3 names the sizes of an indexer all the same
        return 0
    return kinds.count("indexed_attention") or num_layers


def _kv_heads(text: Mapping[str, Any]) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # which Falcon has with groups
        return 1
    return _number(text, ("num_key_value_heads", "num_kv_heads", *NAMES["num_heads"]))


def _kv_vectors(text: Mapping[str, Any]) -> int:
    """Heads of keys and of values of a layer; a latent, which is both of all heads, is one."""
    return 1 if _number(text, ("kv_lora_rank",)) else 2 * _kv_heads(text)


def _kv_of_layer(text: Mapping[str, Any]) -> int:
    if latent := _number(text, ("kv_lora_rank",)):  # of all heads; its values are a part of its key
        return latent + _number(text, ("qk_rope_head_dim",))
    return _kv_vectors(text) * _head_dim(text)


def _number(text: Mapping[str, Any], names: Iterable[str]) -> int:
    values = (text.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)


def _dtype(text: Mapping[str, Any]) -> str:
    name = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "float32"
