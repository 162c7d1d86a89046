"""DeciLM: a Llama whose layers have different numbers of key heads. Each is repeated up to the largest number."""

from __future__ import annotations

from typing import Any

from pagewire.ipc.families.family import Config, Family, Rows, Split, heads, llama

OF_LAYERS = "num_key_value_heads_per_layer"


def _settings(values: Config) -> dict[str, Any]:
    if "block_configs" in values:
        raise ValueError(
            "a DeciLM model with block_configs has layers without attention, which are not served; take a model "
            "whose layers all have attention"
        )
    return llama(values, num_key_value_heads=max(values[OF_LAYERS]))


def _repeated(config: Config, layer: int) -> tuple[Rows, ...]:
    _, most, size = heads(config)
    counts = config[OF_LAYERS]
    own = int(counts[layer]) if layer < len(counts) else most
    if not 1 <= own <= most or most % own:
        raise ValueError(f"layer {layer} has {own} key heads, and {most} are no multiple of them")
    # The keys of a head serve neighbouring queries: repeated side by side, they serve the same ones.
    rows = tuple(range(head * size, (head + 1) * size) for head in range(own) for _ in range(most // own))
    return (rows,)


DECILM = Family(
    "DeciLM",
    frozenset({"DeciLMForCausalLM"}),
    frozenset({"deci"}),
    _settings,
    layer={name: Split((name,), _repeated) for name in ("self_attn.k_proj", "self_attn.v_proj")},
)
