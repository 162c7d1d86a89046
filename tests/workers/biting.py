"""Settings and weights of tiny models that show a part which is left out: none is zero, one, or flat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

SPREAD = 0.15
"""Standard deviation of weights; with less, 64 columns make logits that all tokens share."""
BIASES = ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "add_bias_linear", "bias")
SCALES: dict[str, float] = {
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 1.5,
    "logits_soft_cap": 3.0,
    "logit_scale": 0.6,
    "logits_scaling": 1.6,
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "lm_head_multiplier": 1.7,
    "key_multiplier": 1.4,
    "routed_scaling_factor": 1.7,
    "query_pre_attn_scalar": 9,
    "partial_rotary_factor": 0.5,
}
GROUPS = {"n_group": 2, "topk_group": 1}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 64,
}


def settings(config: Any) -> Iterator[dict[str, Any]]:
    """Fields that bite, a few at a time, of those that a configuration's text model has.

    A family may not take some of them, so they are tried one after the other.
    """
    values = config.get_text_config().to_dict()
    yield {name: value for name, value in SCALES.items() if type(values.get(name)) in (int, float)}
    yield {name: True for name in BIASES if values.get(name) is False}
    if values.keys() >= GROUPS.keys():
        yield GROUPS | {name: 8 for name in EXPERTS if name in values}
    if isinstance(values.get("norm_topk_prob"), bool):
        yield {"norm_topk_prob": not values["norm_topk_prob"]}
    if isinstance(tied := getattr(config, "tie_word_embeddings", None), bool):
        yield {"tie_word_embeddings": not tied}
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") == "default":
        yield {"rope_parameters": rope | YARN}


@torch.no_grad()
def bite(model: Any, seed: int = 0) -> None:
    """Change weights in place, so that every bias, norm and buffer of a checkpoint has an effect.

    Vectors and what is constant get random numbers added, and matrices of little spread get more.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    for tensor in {id(tensor): tensor for tensor in saved.values()}.values():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if not isinstance(tensor, torch.nn.Parameter):
            if bool((tensor == tensor.flatten()[0]).all()):  # others are made of each other, as decays are
                tensor += SPREAD * noise.abs()  # a variance stays positive
        elif tensor.numel() == max(tensor.shape, default=1) or (spread := float(tensor.float().std())) == 0:
            tensor += SPREAD * noise
        elif spread < SPREAD / 3:
            tensor *= SPREAD / spread


def bitten(make: Any, config: Any) -> tuple[Any, set[str]]:
    """A configuration with the settings that a family can have of those that bite, and their names.

    make: the class of transformers that makes the model. A setting stays where the model runs with it, and makes
    numbers.
    """
    chosen: dict[str, Any] = {}
    for fields in settings(config):
        if fields and runs(make, config, chosen | fields):
            chosen |= fields
    return with_fields(config, chosen), set(chosen)


def with_fields(config: Any, fields: dict[str, Any]) -> Any:
    """A configuration whose text model has these fields."""
    values, text = config.to_dict(), config.get_text_config()
    part = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    (values if part is None else values[part]).update(fields)
    if "tie_word_embeddings" in fields:
        values["tie_word_embeddings"] = fields["tie_word_embeddings"]
    return type(config).from_dict(values)


def runs(make: Any, config: Any, fields: dict[str, Any]) -> bool:
    """True if a model with these fields makes numbers."""
    try:
        model = make.from_config(with_fields(config, fields)).float().eval()
        with torch.inference_mode():
            logits = model(input_ids=torch.arange(3, 12)[None], use_cache=False).logits
    except Exception:  # whatever a family says of settings that it does not have
        return False
    return bool(logits.isfinite().all())
